"""The end of inner groups that have lost a member: none of it may hang unnoticed.

All are aborted at once, each in a thread of its own: aborting one may wait for another. An abort
that hangs, or a device that does not come to an end after it, leaves the main thread waiting for
ever. So a thread watches both.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tmd.fabric.generations.generation import Generation

ABORT_S = 30.0
"""Longest time that aborts may take. Collectives of a hung one may never end."""
SETTLE_S = 300.0
"""Longest time that a device may take after a loss. It may still compute most of a step."""

log = logging.getLogger("tmd.trainer")

OnHung = Callable[[tuple[str, ...]], None]


class Aborts:
    """Aborts of one worker. Thread-safe.

    Args:
        abort_s: see :data:`ABORT_S`.
        settle_s: see :data:`SETTLE_S`.
        on_hung: called with the groups that hang.
    """

    def __init__(self, abort_s: float, settle_s: float, on_hung: OnHung) -> None:
        self._abort_s, self._settle_s, self._on_hung = abort_s, settle_s, on_hung
        self._threads: dict[Generation, threading.Thread] = {}
        self._settling: list[_Settling] = []
        self._changed = threading.Condition()

    def begin(self, lost: Sequence[Generation]) -> None:
        """Abort ``lost``, which are marked as aborted; returns at once."""
        refused = []
        with self._changed:
            for generation in lost:
                if thread := _started(generation.abort, f"tmd-abort-{generation.name}"):
                    self._threads[generation] = thread
                else:
                    refused.append(generation.name)
        if refused:
            self._on_hung(tuple(refused))

    def watch(self) -> None:
        """Report what hangs of the aborts that run, and of what waits for the device."""
        _started(self._watch, "tmd-aborts")

    def await_end(self, within_s: float) -> tuple[str, ...]:
        """Wait for all aborts; returns the groups whose abort has not ended after ``within_s``.

        Their collectives may never end, so that only the end of this process frees its main thread.
        """
        with self._changed:
            threads = dict(self._threads)
        deadline = time.monotonic() + within_s
        for thread in threads.values():
            thread.join(max(deadline - time.monotonic(), 0))
        return tuple(each.name for each, thread in threads.items() if thread.is_alive())

    def running(self) -> set[Generation]:
        """Those whose abort has not ended."""
        with self._changed:
            self._threads = {g: thread for g, thread in self._threads.items() if thread.is_alive()}
            return set(self._threads)

    @contextmanager
    def settling(self, group: str, lost: Callable[[], bool]) -> Iterator[None]:
        """Context in which a thread waits for the operations of ``group`` to end. ``lost``: whether
        a member was lost; one that is lost from here on is watched by its own abort."""
        settling = _Settling(group)
        with self._changed:
            self._settling.append(settling)
        try:
            if lost():
                self.watch()
            yield
        finally:
            with self._changed:
                self._settling.remove(settling)
                self._changed.notify_all()

    def _watch(self) -> None:
        with self._changed:
            settling = list(self._settling)
        if hung := self.await_end(self._abort_s):
            return self._on_hung(hung)
        with self._changed:
            self._changed.wait_for(lambda: not _both(settling, self._settling), self._settle_s)
            hung = tuple(each.group for each in _both(settling, self._settling))
        if hung:
            self._on_hung(hung)


class _Settling:
    """A thread that waits for the operations of a group."""

    def __init__(self, group: str) -> None:
        self.group = group


def _both(first: Sequence[_Settling], second: Sequence[_Settling]) -> list[_Settling]:
    return [each for each in first if each in second]


def _started(target: Callable[[], None], name: str) -> threading.Thread | None:
    """A thread that runs ``target``; ``None`` if the system refuses one."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        log.error("cannot start thread %s: %s", name, error)
        return None
    return thread
