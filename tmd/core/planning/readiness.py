"""Checks whether a job would survive the next loss: each rank needs a fit standby."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from tmd.core.planning.migration import PlanFacts, is_live
from tmd.core.planning.standby_reasons import shortfall
from tmd.core.planning.standbys import candidates, line, takes
from tmd.core.values.model import ClusterView, JobRecord, JobState, Member
from tmd.core.values.shadows import ranges

NO_FIT_STANDBY = "job.no_fit_standby"
SHRUNK = "job.shrunk"
RECORD_TOO_NEW = "job.record_too_new"
"""Codes of the leader's findings about jobs."""


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


class Readiness(Struct, frozen=True):
    """The standbys of a job, and the ranks that none of them could take now.

    While a plan is live its joiner is not among the standbys.
    """

    rehearsed: int
    """Fit for some rank, and a rehearsal has proved it."""
    unrehearsed: int
    """Fit for some rank, as far as known."""
    unfit: int
    open_ranks: tuple[int, ...]


def readiness(view: ClusterView, record: JobRecord) -> Readiness:
    """How well a job is prepared for a loss."""
    facts = PlanFacts(view, record.job)
    waiting = line(view, record, facts)
    spare = candidates(view, record, facts)
    untried = {s.member for s in waiting if s.standing.untried}
    return Readiness(
        rehearsed=sum(member not in untried for member in spare),
        unrehearsed=sum(member in untried for member in spare),
        unfit=len(waiting) - len(spare),
        open_ranks=_open_ranks(record, spare, facts),
    )


def unprotected(view: ClusterView, record: JobRecord) -> Gap | None:
    """The gap in the protection of a job; ``None`` if there is none, a plan is live, or an
    unreadable host may have standbys."""
    if record.state is not JobState.RUNNING or is_live(record.plan) or view.unread:
        return None
    facts = PlanFacts(view, record.job)
    spare = candidates(view, record, facts)
    ranks = _open_ranks(record, spare, facts)
    if not ranks:
        return None
    return Gap(record.job, ranks, shortfall(ranks, view, record, facts))


def _open_ranks(record: JobRecord, spare: Sequence[Member], facts: PlanFacts) -> tuple[int, ...]:
    return tuple(r for r in range(record.world_size) if not takes(spare, r, facts))
