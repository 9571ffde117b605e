"""Detects that a trainer's process is exiting or has exited, even without its launcher.

The launcher reports exits, but it can be killed together with its workers, and a trainer may run
without a launcher. Kernel facts are used instead: a robust futex shows that a process is exiting,
a pidfd that it has exited.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

import structlog

from tmd.core.values.model import Activity, Exit
from tmd.core.values.reasons import in_words
from tmd.daemon.roster import Roster
from tmd.robust_futex import FutexWatch

GRACE_S = 1.0
"""How long the launcher may take to report how the process ended."""
UNKNOWN = 255
"""Exit status when the real one is unknown."""

log = structlog.get_logger("tmd.agents")


class Lifelines:
    """Owns a pidfd and a futex of each connected worker. Closed by :meth:`close`."""

    def __init__(
        self, roster: Roster, on_ending: Callable[[], None], has_time: Callable[[str, str], bool]
    ) -> None:
        """
        Args:
            roster: gets the exits.
            on_ending: called when the kernel begins to end a worker. Its process may stay, and has
                to be killed at once, even while the store is away.
            has_time: whether a launcher will report how a worker of a job ended, and nobody waits
                for that. A shell script may go on for long after its Python.
        """
        self._roster = roster
        self._on_ending = on_ending
        self._has_time = has_time
        self._open: dict[str, int] = {}
        self._watches: dict[str, FutexWatch] = {}
        self._graces: dict[str, asyncio.TimerHandle] = {}

    def watch(self, worker: str, job: str, pid: int) -> None:
        """Detect the exit of process ``pid`` of ``worker``. Repeated calls are ignored."""
        if worker in self._open:
            return
        if worker in self._graces:
            # A shell script has started Python again. The state of its rank is gone.
            self._guess(worker, job)
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return  # the process is in another PID namespace: only its launcher can report its exit
        self._open[worker] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._ended, worker, job)

    def watch_futex(self, worker: str, job: str, fd: int, thread: int) -> None:
        """Detect that ``worker`` begins to exit; its ``thread`` holds the futex behind ``fd``."""
        loop = asyncio.get_running_loop()

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # the daemon is exiting, too
                loop.call_soon_threadsafe(self._ending, worker, job)

        if worker in self._watches:
            return
        try:
            self._watches[worker] = FutexWatch(fd, thread, notify)
        except OSError as error:
            log.info("worker exits will be detected late", worker=worker, reason=in_words(error))

    def close(self) -> None:
        for worker in list(self._open):
            self._drop(worker)
        for watch in self._watches.values():
            watch.close()
        for grace in self._graces.values():
            grace.cancel()

    def _drop(self, worker: str) -> None:
        pidfd = self._open.pop(worker)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        watch = self._watches.pop(worker, None)
        if watch is not None:
            watch.close()

    def _ending(self, worker: str, job: str) -> None:
        log.warning("the kernel is ending a worker", worker=worker)
        self._watches.pop(worker, None)
        self._roster.exited(Exit(worker, job, None, at=time.time()))
        self._on_ending()

    def _ended(self, worker: str, job: str) -> None:
        log.info("the process of a worker has ended", worker=worker)
        self._drop(worker)
        self._wait_for_report(worker, job)

    def _wait_for_report(self, worker: str, job: str) -> None:
        loop = asyncio.get_running_loop()
        self._graces[worker] = loop.call_later(GRACE_S, self._unreported, worker, job)

    def _unreported(self, worker: str, job: str) -> None:
        if self._roster.ended(worker):
            del self._graces[worker]
        elif self._has_time(worker, job):
            self._wait_for_report(worker, job)
        else:
            self._guess(worker, job)

    def _guess(self, worker: str, job: str) -> None:
        self._graces.pop(worker).cancel()
        if self._roster.ended(worker):
            return
        known = self._roster.workers.get(worker)
        code = 0 if known and known.status.activity is Activity.LEFT else UNKNOWN
        log.warning("worker exited, no launcher reported how", worker=worker)
        self._roster.exited(Exit(worker, job, code, at=time.time()))
