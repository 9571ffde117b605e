"""What the ranks of a job report, as the rows and the charts of the page show it."""

from __future__ import annotations

from math import isfinite

from msgspec import Struct

from tmd.core.values.model import ClusterView, JobRecord, WorkerStatus


class Ranks(Struct, frozen=True):
    """The latest report of each rank of a job."""

    statuses: tuple[WorkerStatus | None, ...]
    """Indexed by rank. ``None`` stands for a rank without a heartbeat."""

    @property
    def reports(self) -> list[WorkerStatus]:
        return [status for status in self.statuses if status is not None]

    @property
    def step(self) -> int:
        """Step of the foremost rank; 0 without a report."""
        return max((status.step for status in self.reports), default=0)

    @property
    def loss(self) -> float | None:
        """The mean of the finite losses of all ranks. A NaN never equals itself, so the row would
        count as changed each time."""
        losses = [s.loss for s in self.reports if s.loss is not None and isfinite(s.loss)]
        return sum(losses) / len(losses) if losses else None


def ranks_of(view: ClusterView, record: JobRecord) -> Ranks:
    known = view.workers(record.job)
    return Ranks(tuple(known.get(m.worker) for m in record.membership.members))
