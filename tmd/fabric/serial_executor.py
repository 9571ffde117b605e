"""Runs one operation at a time, in call order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

QueuedCall = Callable[[], None]
"""Must not raise."""
ENDING_S = 2.0


class SerialExecutor:
    """Runs jobs in order on its own thread, which starts with the first one.

    A job whose caller waits for it runs in the caller's thread if the queue is empty: that saves
    two thread switches. ``close`` ends the thread once the queue is empty.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[QueuedCall | None] = SimpleQueue()
        self._turn = threading.Lock()
        self._idle = threading.Condition()
        self._pending = 0
        self._open = True
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is running or queued."""
        return self._pending > 0

    def run(self, job: QueuedCall, *, inline: bool) -> None:
        """Run ``job`` after all earlier ones; if ``inline``, possibly before returning."""
        with self._idle:
            alone = self._pending == 0
            if self._open and not (inline and alone):
                self._start()
                self._pending += 1
                self._queue.put(job)
                return
            self._pending += 1
        try:
            with self._turn:
                job()
        finally:
            self._done()

    def drain(self, timeout: float | None) -> bool:
        """Wait until nothing runs or is queued; ``False`` after ``timeout``, if there is one."""
        with self._idle:
            return self._idle.wait_for(lambda: self._pending == 0, timeout)

    def close(self) -> None:
        """End the thread after the queued jobs; later jobs run in the caller's thread.

        It waits briefly: a thread inside torch at interpreter exit aborts the process.
        """
        with self._idle:
            if self._open and self._thread is not None:
                self._queue.put(None)
            self._open = False
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(ENDING_S)

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            thread.start()
            self._thread = thread  # not before: if no thread can be had, the next job tries

    def _loop(self) -> None:
        while (job := self._queue.get()) is not None:
            with self._turn:
                job()
            # The waiting thread must not keep the last job's tensors alive.
            del job
            self._done()

    def _done(self) -> None:
        with self._idle:
            self._pending -= 1
            if self._pending == 0:
                self._idle.notify_all()
