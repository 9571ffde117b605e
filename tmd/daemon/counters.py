"""What this daemon has counted since it started, for ``/metrics``.

Each daemon counts the alerts that it raised or cleared and, as leader, the revisions that it wrote.
So the sum over all hosts counts each event once, whoever led. On a host that may lead, migrations
and lost time are shown as 0 from the start: ``increase`` and ``rate`` do not see an event that
begins a series. Histograms are not, since each has many series.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection

from tmd.core.planning.goodput import LossCause, ended, losses, phases_left, standstill
from tmd.core.values.model import (
    Alert,
    ClusterView,
    JobRecord,
    Phase,
    PlanKind,
    Severity,
    State,
)
from tmd.daemon.loss_ledger import LossLedger

MOST_CODES = 500
OTHER_CODES = "other"
"""Counts further codes: a plug-in that invents codes must not fill the memory."""
GONE_S = 3600.0
"""The counts of a job that is gone are shown for this long, so that the last ones are scraped."""
OUTCOMES = (Phase.DONE, Phase.ABORTED)
BUCKETS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


class AlertCounter:
    """Alerts by code, severity and state."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, Severity, State]] = Counter()
        self._codes: set[str] = set()

    def add(self, alert: Alert) -> None:
        if alert.code not in self._codes and len(self._codes) < MOST_CODES:
            self._codes.add(alert.code)
        code = alert.code if alert.code in self._codes else OTHER_CODES
        for state in State:
            self.counts.setdefault((code, alert.severity, state), 0)
        self.counts[code, alert.severity, alert.state] += 1


class Histogram:
    """Durations in ``BUCKETS_S``."""

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts = [0] * (len(BUCKETS_S) + 1)

    def observe(self, seconds: float) -> None:
        self.sum_s += seconds
        self._counts[bisect_left(BUCKETS_S, seconds)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds and cumulative counts."""
        found, total = [], 0
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), self._counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class JobCounter:
    """Migrations that this daemon led, and the time that jobs lost meanwhile."""

    def __init__(self, *, may_lead: bool = True) -> None:
        """``may_lead``: whether there may ever be something to count."""
        self._may_lead = may_lead
        kinds = PlanKind if may_lead else ()
        self.ended = Counter({(kind, outcome): 0 for kind in kinds for outcome in OUTCOMES})
        """(kind, outcome) -> number."""
        self.phases: dict[tuple[PlanKind, Phase], Histogram] = {}
        self.lost: dict[tuple[str, LossCause], float] = {}
        """(job, cause) -> rank seconds."""
        self._standing: dict[str, tuple[LossCause, float]] = {}
        """Jobs that stand still: why, and up to which time it is counted."""
        self._here: dict[str, float] = {}
        """The jobs of ``lost``, and when each was there last (monotonic)."""
        self.ledger = LossLedger()

    def wrote(self, before: JobRecord | None, after: JobRecord, view: ClusterView) -> None:
        """Count what the stored revision ``after`` ended."""
        self.ledger.seen(after)
        for time in phases_left(before, after):
            self.phases.setdefault((time.kind, time.phase), Histogram()).observe(time.seconds)
        if (plan := ended(before, after)) is not None:
            self.ended[plan.kind, plan.phase] += 1
        for loss in losses(before, after, view):
            self._lose(after.job, loss.cause, loss.rank_seconds)

    def look(self, record: JobRecord, view: ClusterView, now: float) -> None:
        """Count the standstill of a job up to ``now`` (monotonic)."""
        self.ledger.seen(record)
        cause, since = self._standing.pop(record.job, (None, now))
        if cause is not None:
            self._lose(record.job, cause, (now - since) * record.world_size)
        cause = standstill(record, view)
        if cause is not None:
            self._standing[record.job] = cause, now

    def keep(self, jobs: Collection[str], now: float) -> None:
        """Show ``jobs``, also those that have lost nothing, and at last forget those that are gone.
        Whether this daemon leads does not matter, only whether it may."""
        if not self._may_lead:
            return
        for job in jobs:
            for cause in LossCause:
                self.lost.setdefault((job, cause), 0.0)
        self._here = {job: self._here.get(job, now) for job, _ in self.lost}
        self._here |= dict.fromkeys(jobs, now)
        gone = {job for job, seen in self._here.items() if now - seen > GONE_S}
        self.lost = {key: lost for key, lost in self.lost.items() if key[0] not in gone}
        self.ledger.forget(gone)

    def follow(self, jobs: Collection[str]) -> None:
        """Only standstills of ``jobs`` go on to be counted: about others nothing is known here."""
        self._standing = {job: seen for job, seen in self._standing.items() if job in jobs}

    def _lose(self, job: str, cause: LossCause, rank_seconds: float) -> None:
        self.ledger.add(job, cause, rank_seconds)
        self.lost[job, cause] = self.lost.get((job, cause), 0.0) + rank_seconds
