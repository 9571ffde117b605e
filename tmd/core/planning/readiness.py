"""Checks whether a job would survive the next loss: each rank needs a fit standby."""

from __future__ import annotations

from msgspec import Struct

from tmd.core.planning.migration import PlanFacts, is_live
from tmd.core.planning.standbys import candidates, shortfall, takes
from tmd.core.values.model import ClusterView, JobRecord, JobState
from tmd.core.values.shadows import ranges

NO_FIT_STANDBY = "job.no_fit_standby"
"""Code of the finding."""


class Gap(Struct, frozen=True):
    """Ranks of a running job that no standby could take now."""

    job: str
    ranks: tuple[int, ...]
    why: str

    @property
    def sentence(self) -> str:
        """The text for operators."""
        which = "rank" if len(self.ranks) == 1 else "ranks"
        return f"no standby could take {which} {ranges(self.ranks)}: {self.why}"


def unprotected(view: ClusterView, record: JobRecord) -> Gap | None:
    """The gap in the protection of a job; ``None`` if there is none, a plan is live, or an
    unreadable host may have standbys."""
    if record.state is not JobState.RUNNING or is_live(record.plan) or view.unread:
        return None
    facts = PlanFacts(view, record.job)
    spare = candidates(view, record, facts)
    ranks = tuple(r for r in range(record.world_size) if not takes(spare, r, facts))
    if not ranks:
        return None
    return Gap(record.job, ranks, shortfall(ranks, view, record, facts))
