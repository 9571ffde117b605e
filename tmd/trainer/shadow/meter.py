"""Processor time of a task, summed over the threads that worked on it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator


class Meter:
    """Thread-safe."""

    def __init__(self) -> None:
        self._adding = threading.Lock()
        self._seconds = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the calling thread's processor time in this context."""
        begin = time.thread_time()
        try:
            yield
        finally:
            with self._adding:
                self._seconds += time.thread_time() - begin

    def read(self) -> float:
        """Processor seconds of the contexts that have ended since the previous call."""
        with self._adding:
            seconds, self._seconds = self._seconds, 0.0
        return seconds
