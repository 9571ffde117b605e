"""How long things have been as they are: what the leader's deadlines are counted from. Pure."""

from __future__ import annotations

from typing import NamedTuple

from tmd.core.planning.migration import PlanFacts
from tmd.core.values.model import ClusterView, JobRecord, Phase


class Situation(NamedTuple):
    """What must stay the same for a deadline of a job to go on running."""

    epoch: int
    plan: str
    phase: Phase | None
    stuck: bool
    unheard: frozenset[str]
    """Members and parties of the plan of which no host says anything. Right after Redis was away,
    or emptied, that is everybody who has not come back yet, and nobody may be taken for dead by the
    time that has passed before."""


class Seen(NamedTuple):
    """A situation, and since when (seconds, monotonic) this leader has seen it."""

    situation: Situation
    since: float


def seen(before: Seen | None, view: ClusterView, record: JobRecord, now: float) -> Seen:
    """What this leader sees of the job of ``record``; ``before`` is what it saw the last time."""
    found = _situation(view, record)
    return before if before is not None and before.situation == found else Seen(found, now)


def _situation(view: ClusterView, record: JobRecord) -> Situation:
    facts, plan = PlanFacts(view, record.job), record.plan
    return Situation(
        epoch=record.membership.epoch,
        plan=plan.id if plan else "",
        phase=plan.phase if plan else None,
        stuck=facts.stuck(record.membership),
        unheard=frozenset(m.worker for m in record.parties if m.worker not in facts.status),
    )
