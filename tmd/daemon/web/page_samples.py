"""The recent past of each job for the charts of the page: loss, pace, and seconds by rank.

Ranks are grouped into at most :data:`BINS` bins of neighbours, of which each shows its slowest
rank, so that the size of a sample does not depend on the number of ranks.
"""

from __future__ import annotations

from msgspec import Struct

from tmd.core.planning.goodput import step_seconds
from tmd.core.values.model import ClusterView, JobRecord, WorkerStatus
from tmd.core.values.view_checks import ENDED
from tmd.daemon.web.page_rows import ranks_of

BINS = 64
KEPT = 300
"""Samples of a job."""
MOST_JOBS = 16
"""Jobs that are sampled."""
DIGITS = 4


class Sample(Struct, frozen=True, omit_defaults=True):
    """A job at one time."""

    number: int
    """Of the look at all jobs, counted by this daemon: unlike ``at`` it never goes back."""
    at: float
    step: int
    step_s: float
    """Median of the latest step of all ranks."""
    loss: float | None = None
    cells: tuple[float, ...] = ()
    """For each bin of ranks the seconds of its slowest rank; 0 where none has reported."""
    computed: bool = False
    """Whether ``cells`` are the seconds that a rank computes, without waits for others: known once
    each rank has compared itself with its peers. Otherwise they are those of its whole step."""


Samples = dict[str, tuple[Sample, ...]]
"""Job -> samples, oldest first."""


def sampled(before: Samples, view: ClusterView, now: float, number: int) -> Samples:
    """``before`` and one sample of each job that has made a step since. If the clock was set back,
    what is later than ``now`` is dropped."""
    found: Samples = {}
    for record in sorted(view.jobs, key=lambda r: r.state in ENDED)[:MOST_JOBS]:
        known = tuple(s for s in before.get(record.job, ()) if s.at <= now)
        fresh = _sample(view, record, now, number)
        if fresh is not None and not (known and known[-1].step == fresh.step):
            known = (*known, fresh)[-KEPT:]
        if known:
            found[record.job] = known
    return found


class History:
    """The samples of one daemon: taken while it leads, and while a page is open."""

    def __init__(self) -> None:
        self.samples: Samples = {}
        self._looks = 0

    def take(self, view: ClusterView, now: float) -> None:
        """Add a sample of each job of ``view``."""
        self._looks += 1
        self.samples = sampled(self.samples, view, now, self._looks)


def newer(samples: Samples, than: int) -> Samples:
    """Those of looks after number ``than``."""
    fresh = {job: tuple(s for s in known if s.number > than) for job, known in samples.items()}
    return {job: known for job, known in fresh.items() if known}


def _sample(view: ClusterView, record: JobRecord, now: float, number: int) -> Sample | None:
    ranks = ranks_of(view, record)
    if not ranks.step:
        return None
    computed = all(status is not None and status.pace is not None for status in ranks.statuses)
    return Sample(
        number=number,
        at=now,
        step=ranks.step,
        step_s=rounded(step_seconds(record, view)),
        loss=None if ranks.loss is None else rounded(ranks.loss),
        cells=binned([_seconds(status, computed) for status in ranks.statuses]),
        computed=computed,
    )


def _seconds(status: WorkerStatus | None, computed: bool) -> float:
    if status is None:
        return 0.0
    if computed and status.pace is not None:
        return status.pace.busy_s
    return status.step_seconds


def binned(values: list[float]) -> tuple[float, ...]:
    """The largest of each of at most :data:`BINS` groups of neighbours."""
    size = -(-len(values) // BINS)
    return tuple(rounded(max(values[at : at + size])) for at in range(0, len(values), size or 1))


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
