"""Starts the reader and takes what it says before the deadline."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from pathlib import Path

import msgspec

from tmd.plugin import bare_python

from .facts import Answer, Clock, Facts, Question, Space

READER = Path(__file__).with_name("reader.py")
END_S = 1.0


async def ask(question: Question, timeout_s: float) -> Answer | None:
    """An answer, whole or as far as it came; ``None`` if not even the facts did.

    The reader is ended in any case; one that cannot end is left to the kernel.
    """
    try:
        child = await asyncio.create_subprocess_exec(
            *bare_python(READER, msgspec.json.encode(question).decode()),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=DEVNULL,
            start_new_session=True,  # Ctrl-C at a terminal is for us
        )
    except OSError:
        return None
    lines: list[bytes] = []
    late = asyncio.timeout(timeout_s)
    try:
        with suppress(TimeoutError):
            async with late:
                await _collect(child, lines)
    finally:
        await _end(child)
    return parse(lines, question.paths, late=late.expired())


def parse(lines: list[bytes], paths: tuple[str, ...], *, late: bool) -> Answer | None:
    """The answer of a reader that was asked for ``paths``; ``late``: it had to be ended."""
    try:
        facts = msgspec.json.decode(lines[0], type=Facts)
        spaces = [msgspec.json.decode(x, type=Space | None) for x in lines[1 : len(paths) + 1]]
        clocks = [msgspec.json.decode(x, type=Clock | None) for x in lines[len(paths) + 1 :]]
    except (IndexError, msgspec.DecodeError):
        return None
    hangs = paths[len(spaces)] if late and len(spaces) < len(paths) else None
    known = tuple(space for space in spaces if space is not None)
    return Answer(facts, known, hangs, clocks[0] if clocks else None)


async def _collect(child: Process, lines: list[bytes]) -> None:
    assert child.stdout is not None
    async for line in child.stdout:
        lines.append(line)  # noqa: PERF401 - what came before the deadline must not be lost


async def _end(child: Process) -> None:
    with suppress(ProcessLookupError):
        child.kill()
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await child.communicate()
