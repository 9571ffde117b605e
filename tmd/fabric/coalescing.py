"""Blocks of operations that torch waits for as one: what each thread has begun in its own.

torch's manager does not end a block that an exception leaves. What such a block holds would stay
for ever, with its tensors, so the vote at the end of a step ends it.
"""

from __future__ import annotations

import threading

from tmd.fabric.work import Work


class _Blocks(threading.local):
    def __init__(self) -> None:
        self.of: dict[object, list[Work]] = {}
        """By group."""


_blocks = _Blocks()


def begin(group: object) -> None:
    """A new block of this thread. One that was not ended is dropped."""
    _blocks.of[group] = []


def note(group: object, work: Work) -> None:
    """``work`` was begun, perhaps in a block of this thread."""
    if (block := _blocks.of.get(group)) is not None:
        block.append(work)


def end(group: object) -> list[Work]:
    """What was begun in the block of this thread."""
    return _blocks.of.pop(group, [])


def end_all() -> None:
    """No block of this thread is under way: it was left, not ended."""
    _blocks.of.clear()
