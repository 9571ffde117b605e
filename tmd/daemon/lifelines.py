"""Knowing that a trainer's process ends, and has ended, even if nobody is left to say how.

Its launcher tells of exits; but a launcher can be killed together with its workers, and a trainer
may have been started without one. The kernel's word is the fact used here: a robust futex tells
that a process begins to end, a pidfd that it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

import structlog

from tmd.core.values.model import Activity, Exit
from tmd.core.values.reasons import in_words
from tmd.daemon.roster import Roster
from tmd.robust_futex import FutexWatch

GRACE_S = 1.0
"""So long the launcher has to say how the process ended."""
UNKNOWN = 255
"""Exit status where nobody knows it."""

log = structlog.get_logger("tmd.agents")


class Lifelines:
    """A pidfd and a futex of each connected worker. Owns them; closed by :meth:`close`."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._open: dict[str, int] = {}
        self._watches: dict[str, FutexWatch] = {}
        self._graces: dict[str, asyncio.TimerHandle] = {}

    def watch(self, worker: str, job: str, pid: int) -> None:
        """Notice when process ``pid`` of ``worker`` has ended. Repeats are ignored."""
        if worker in self._open:
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return  # in a container whose processes we cannot see: its launcher must tell
        self._open[worker] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._ended, worker, job)

    def watch_futex(self, worker: str, job: str, fd: int, thread: int) -> None:
        """Notice when ``worker``, whose ``thread`` holds the futex behind ``fd``, begins to end."""
        loop = asyncio.get_running_loop()

        def told() -> None:
            with contextlib.suppress(RuntimeError):  # the daemon ends as well
                loop.call_soon_threadsafe(self._ending, worker, job)

        if worker in self._watches:
            return
        try:
            self._watches[worker] = FutexWatch(fd, thread, told)
        except OSError as error:
            log.info("exits will be noticed late", worker=worker, reason=in_words(error))

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
        log.warning("worker is being ended by the kernel", worker=worker)
        self._watches.pop(worker, None)
        self._roster.exited(Exit(worker, job, None, at=time.time()))

    def _ended(self, worker: str, job: str) -> None:
        self._drop(worker)
        loop = asyncio.get_running_loop()
        self._graces[worker] = loop.call_later(GRACE_S, self._untold, worker, job)

    def _untold(self, worker: str, job: str) -> None:
        del self._graces[worker]
        if self._roster.ended(worker):
            return
        known = self._roster.workers.get(worker)
        code = 0 if known and known.status.activity is Activity.LEFT else UNKNOWN
        log.warning("worker is gone, no launcher says how it ended", worker=worker)
        self._roster.exited(Exit(worker, job, code, at=time.time()))
