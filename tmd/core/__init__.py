"""Decisions as pure functions on frozen values: no IO, no clock, no torch, no asyncio.

``worker`` decides what one worker does next, ``planning`` assigns ranks to workers, ``alerts``
turns findings into alerts, and ``values`` holds the types that all of them share. Each package
imports only those named after it. Daemon, trainer, CLI and tests call it; it calls none of them.
docs/how/design.md states the invariants I1 to I9 that comments cite.
"""
