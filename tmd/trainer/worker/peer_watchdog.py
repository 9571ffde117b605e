"""Calls the peers that this rank waits for, in case their whole host is frozen.

If all processes of a host are frozen (a suspended machine) its kernel keeps the links open, and its
daemon cannot report that the worker is silent. A rank that waits long therefore calls its
neighbours itself. A neighbour that misses several calls in a row counts as lost, and the step
breaks as if its link had broken.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

from tmd.fabric import EpochView, Fabric, PeerLost

LOOK_S = 5.0
"""Interval at which the watchdog checks whether this rank waits."""
LONG = 4
"""Number of checks in a row in which it must have waited."""
MISSES = 3
"""Calls in a row that a neighbour may miss, each of some seconds: code that holds the interpreter
for a while must not look like a frozen machine."""

MISSES_AT_FIRST = 60
"""The limit for a peer to which there is no link yet. It may compile or load data for minutes
before its first collective, which cannot be repeated."""

log = logging.getLogger("tmd.trainer")


class PeerWatchdog:
    """Owns a thread until closed. ``waiting``: returns whether this rank waits for others."""

    def __init__(
        self, standing: Callable[[], EpochView | None], waiting: Callable[[], bool]
    ) -> None:
        self._standing, self._waiting = standing, waiting
        self._waited = 0
        self._missed: Counter[str] = Counter()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tmd-vigil", daemon=True)

    @classmethod
    def started(cls, fabric: Fabric) -> PeerWatchdog:
        """Watch the peers of ``fabric`` from now on."""
        watchdog = cls(lambda: fabric.standing, lambda: fabric.waiting)
        watchdog._thread.start()
        return watchdog

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * LOOK_S)

    def look(self) -> None:
        """Check once; after a long wait also call each neighbour once."""
        standing = self._standing()
        if standing is None or not self._waiting():
            self._waited = 0
            self._missed.clear()
            return
        self._waited += 1
        if self._waited >= LONG:
            self._call(standing)

    def _call(self, standing: EpochView) -> None:
        linked = standing.linked
        near = linked | standing.opening
        # A worker that holds several ranks is called once.
        for member in dict.fromkeys(standing.membership.members):
            if member.worker not in near or self._closed.is_set():
                continue
            try:
                standing.verify(member)
            except PeerLost as lost:
                self._missed[member.worker] += 1
                limit = MISSES if member.worker in linked else MISSES_AT_FIRST
                if self._missed[member.worker] >= limit:
                    log.warning("breaking the step: %s missed %d calls", lost.worker, limit)
                    standing.blame(lost)
                    return
            else:
                del self._missed[member.worker]

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            self.look()
