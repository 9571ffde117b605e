"""Knowing that a trainer's process has ended, even if nobody is left to say how.

Its launcher tells of exits; but a launcher can be killed together with its workers, and a trainer
may have been started without one. The kernel's word (a pidfd) is the fact used here.
"""

from __future__ import annotations

import asyncio
import os
import time

import structlog

from tmd.core.model import Activity, Exit
from tmd.daemon.roster import Roster

GRACE_S = 1.0
"""So long the launcher has to say how the process ended."""
UNKNOWN = 255
"""Exit status where nobody knows it."""

log = structlog.get_logger("tmd.agents")


class Lifelines:
    """One pidfd per connected worker. Owns them; closed by :meth:`close`."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._open: dict[str, int] = {}
        self._graces: dict[str, asyncio.TimerHandle] = {}

    def watch(self, worker: str, pid: int) -> None:
        """Notice when process ``pid`` of ``worker`` ends. Repeats are ignored."""
        if worker in self._open:
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return  # in a container whose processes we cannot see: its launcher must tell
        self._open[worker] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._ended, worker)

    def close(self) -> None:
        for worker in list(self._open):
            self._drop(worker)
        for grace in self._graces.values():
            grace.cancel()

    def _drop(self, worker: str) -> None:
        pidfd = self._open.pop(worker)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)

    def _ended(self, worker: str) -> None:
        self._drop(worker)
        loop = asyncio.get_running_loop()
        self._graces[worker] = loop.call_later(GRACE_S, self._untold, worker)

    def _untold(self, worker: str) -> None:
        del self._graces[worker]
        known = self._roster.workers.get(worker)
        if known is None:
            return
        status = known.status
        code = 0 if status.activity is Activity.LEFT else UNKNOWN
        log.warning("worker is gone, no launcher says how it ended", worker=worker)
        self._roster.exited(Exit(worker, status.job, code, at=time.time()))
