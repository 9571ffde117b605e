"""Measures the compute time of each step, reports it in the vote, and compares it with the peers'.

All ranks get the same numbers about the same steps in the same vote. Each then judges itself
(:mod:`tmd.core.planning.stragglers`). Main thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from msgspec import structs

from tmd.core.planning.stragglers import BLOCK, PeerTimings, StragglerWatch, Trend, followed, judged
from tmd.core.values.model import WorkerStatus
from tmd.core.values.pace import Pace
from tmd.fabric.wait_timer import Waits, WaitTimer, busy_between

UNKNOWN = 2**63 - 1
"""Value of a rank that has not measured a whole block. Votes take the minimum of all values."""
MICRO = 1_000_000


class Pacing:
    """One worker's measurements, reset when the membership changes."""

    def __init__(self, wait_timer: WaitTimer) -> None:
        self._wait_timer = wait_timer
        self._begin: Waits | None = None
        self._epoch = 0
        self._busy: list[float] = []
        self._busy_now = 0.0
        self._watch = StragglerWatch()
        self._trend = Trend()
        self._pace: Pace | None = None

    def begin(self) -> None:
        """Begin a step once its batch is here."""
        self._begin = self._wait_timer.read()

    def ballot(self, status: WorkerStatus, *, alone: bool = False) -> tuple[int, ...]:
        """Called before the vote: the numbers to add to the vote on the current step.

        On the last step of a block there is one number per rank, else none. This must depend only
        on the step, since all ranks must add equally many. ``alone``: nobody is compared, since
        some workers compute for several ranks.
        """
        if status.epoch != self._epoch:
            # Neighbours on this host, or a move, change the usual duration.
            self._epoch, self._busy = status.epoch, []
            self._watch, self._trend, self._pace = StragglerWatch(), Trend(), None
        self._busy_now = 0.0
        if self._begin is not None:
            self._busy_now = busy_between(self._begin, self._wait_timer.read())
        if (status.step + 1) % BLOCK:
            return ()
        own = [UNKNOWN] * status.world_size
        times = [*self._busy, self._busy_now]
        if not alone and status.rank is not None and len(times) == BLOCK and min(times) > 0:
            own[status.rank] = max(1, round(MICRO * median(times)))
        return tuple(own)

    def voted(self, status: WorkerStatus, result: Sequence[int]) -> None:
        """The step was committed; ``result`` has the number of every rank."""
        self._busy.append(self._busy_now)
        if (status.step + 1) % BLOCK:
            return
        self._busy = []
        rank = status.rank
        peers = [result[r] for r in status.replicas if r != rank and r < len(result)]
        known = tuple(value / MICRO for value in peers if value != UNKNOWN)
        if rank is None or rank >= len(result) or result[rank] == UNKNOWN or not known:
            return
        seen = PeerTimings(status.step + 1, result[rank] / MICRO, known, status.world_size)
        self._watch, self._pace = judged(self._watch, seen)

    def took(self, step_s: float) -> Pace | None:
        """End a step of ``step_s`` seconds; returns the pace to report, if there is one."""
        if step_s > 0:
            self._trend = followed(self._trend, step_s)
        if self._pace is not None and self._pace.group_slow != self._trend.slower:
            self._pace = structs.replace(self._pace, group_slow=self._trend.slower)
        return self._pace
