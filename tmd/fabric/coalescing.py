"""Blocks of operations that torch waits for as one, per thread.

torch's manager does not end a block that an exception leaves. Such a block would stay forever,
with its tensors, so the vote at the end of a step ends it.
"""

from __future__ import annotations

import threading

from tmd.fabric.work import Work


class _Blocks(threading.local):
    def __init__(self) -> None:
        self.of: dict[object, list[Work]] = {}
        """Operations by group."""


_blocks = _Blocks()


def begin(group: object) -> None:
    """Begin a block of this thread. An unfinished one is dropped."""
    _blocks.of[group] = []


def note(group: object, work: Work) -> None:
    """Record that ``work`` began, possibly in a block of this thread."""
    if (block := _blocks.of.get(group)) is not None:
        block.append(work)


def end(group: object) -> list[Work]:
    """The operations that began in this thread's block."""
    return _blocks.of.pop(group, [])


def end_all() -> None:
    """Drop all unfinished blocks of this thread."""
    _blocks.of.clear()
