"""Measures how many threads wait for other workers, and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Waits(NamedTuple):
    """A reading. Times are monotonic seconds."""

    at: float
    total_s: float
    """How long at least one thread has waited for other workers, since the timer was made."""
    called_at: float
    """When the latest operation was called."""
    total_before_s: float
    """``total_s`` at that moment."""
    settled_at: float
    """When the latest operation was completed."""


class WaitTimer:
    """Counts the waiting threads. Thread-safe."""

    def __init__(self, paused: Callable[[], bool] = lambda: False) -> None:
        """``paused``: whether operations wait for a decision of the leader, and not for a rank."""
        self.paused = paused
        self._lock = threading.Lock()
        self.level = 0
        self.own = 0
        """Number of operations that wait for this worker's own device."""
        self._since = 0.0
        self._total = 0.0
        self._called = 0.0
        self._before = 0.0
        self._settled = 0.0

    def __enter__(self) -> None:
        self._change(level=1)

    def __exit__(self, *_: object) -> None:
        self._change(level=-1)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context in which an operation waits for this worker's own device, which may be late.

        A script queues work on a device and calls the next operation long before that is done. For
        the other workers, the operation begins when the device has caught up.
        """
        self._change(computing=1)
        try:
            yield
        finally:
            self._change(computing=-1)
            self.called()

    def _change(self, *, level: int = 0, computing: int = 0) -> None:
        with self._lock:
            now = time.monotonic()
            self._total = self._waited(now)
            self._since = now
            self.level += level
            self.own += computing

    def called(self) -> None:
        """An operation begins."""
        with self._lock:
            self._called = time.monotonic()
            self._before = self._waited(self._called)

    def settled(self) -> None:
        """An operation is complete."""
        with self._lock:
            self._settled = time.monotonic()

    def read(self) -> Waits:
        with self._lock:
            now = time.monotonic()
            return Waits(now, self._waited(now), self._called, self._before, self._settled)

    def _waited(self, now: float) -> float:
        waits = self.level > 0 and self.own == 0
        return self._total + (now - self._since if waits else 0.0)


def busy_between(begin: Waits, end: Waits) -> float:
    """Seconds from ``begin`` to ``end`` in which this worker itself was late.

    DDP waits for the futures of its operations inside torch, where the wait cannot be measured. But
    after the step's last operation is called nothing is left to compute, so the worker waits until
    it completes; of earlier operations only the time that a thread waited in them counts.
    """
    if end.called_at <= begin.at:
        return end.at - begin.at - (end.total_s - begin.total_s)
    earlier = end.total_before_s - begin.total_s
    seen = end.total_s - end.total_before_s
    presumed = min(end.settled_at, end.at) - end.called_at
    return end.at - begin.at - earlier - max(seen, presumed, 0.0)
