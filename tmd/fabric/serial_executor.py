"""One operation at a time, in the order of the calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], None]
"""Must not raise."""
ENDING_S = 2.0


class SerialExecutor:
    """Runs jobs in order on a thread of its own, which starts with the first of them.

    A job whose caller waits for it anyway runs in the caller's thread if nothing is before it: that
    saves two changes of thread. ``close`` ends the thread once the queue is empty.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._turn = threading.Lock()
        self._idle = threading.Condition()
        self._pending = 0
        self._open = True
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is running or queued."""
        return self._pending > 0

    def run(self, job: Job, *, inline: bool) -> None:
        """Run ``job`` after all earlier ones; if ``inline``, possibly before returning."""
        with self._idle:
            alone = self._pending == 0
            self._pending += 1
            if self._open and not (inline and alone):
                self._start()
                self._queue.put(job)
                return
        try:
            with self._turn:
                job()
        finally:
            self._done()

    def drain(self, timeout: float) -> bool:
        """Wait until nothing is running or queued; ``False`` if that took too long."""
        with self._idle:
            return self._idle.wait_for(lambda: self._pending == 0, timeout)

    def close(self) -> None:
        """Let the thread end after what is queued; later jobs run in the thread of the caller.

        Waits for it a while: a thread inside torch when the interpreter ends aborts the process.
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
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        while (job := self._queue.get()) is not None:
            with self._turn:
                job()
            # Nothing may keep the tensors of the last job alive while this thread waits.
            del job
            self._done()

    def _done(self) -> None:
        with self._idle:
            self._pending -= 1
            if self._pending == 0:
                self._idle.notify_all()
