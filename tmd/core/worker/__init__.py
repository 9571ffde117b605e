"""Decides what one worker does next: its states, its events, its responses to directives, and who
carries its collectives.

The trainer's worker package carries these decisions out, and the simulation of the control plane
runs the same tables. It imports :mod:`tmd.core.planning` for the directives, and
:mod:`tmd.core.values`.
"""
