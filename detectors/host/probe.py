"""Starts the reader and collects its output until the deadline."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import msgspec

from tmd.plugin import Child, bare_python

from .facts import Clock, HostFacts, HostReading, Question, Space

READER = Path(__file__).with_name("reader.py")
END_S = 1.0


async def ask(question: Question, timeout_s: float) -> HostReading | None:
    """The reading, complete or partial; ``None`` without even the facts.

    The reader is killed in any case; one that cannot be killed is left to the kernel.
    """
    try:
        child = Child.start(bare_python(READER, msgspec.json.encode(question).decode()))
    except OSError:
        return None
    output = bytearray()
    late = asyncio.timeout(timeout_s)
    try:
        with suppress(TimeoutError):
            async with late:
                while chunk := await child.read():
                    output += chunk
    finally:
        await child.end(END_S)
    *lines, _ = bytes(output).split(b"\n")
    return parse(lines, question.paths, late=late.expired())


def parse(lines: list[bytes], paths: tuple[str, ...], *, late: bool) -> HostReading | None:
    """The result of a reader for ``paths``; ``late``: it had to be killed."""
    try:
        facts = msgspec.json.decode(lines[0], type=HostFacts)
        spaces = [msgspec.json.decode(x, type=Space | None) for x in lines[1 : len(paths) + 1]]
        clocks = [msgspec.json.decode(x, type=Clock | None) for x in lines[len(paths) + 1 :]]
    except (IndexError, msgspec.DecodeError):
        return None
    hangs = paths[len(spaces)] if late and len(spaces) < len(paths) else None
    known = tuple(space for space in spaces if space is not None)
    answered = paths[: len(spaces)]
    return HostReading(facts, known, hangs, clocks[0] if clocks else None, answered)
