"""The time for which a situation has lasted: the leader's deadlines count from it. Pure."""

from __future__ import annotations

from typing import NamedTuple

from tmd.core.planning.migration import PlanFacts
from tmd.core.values.model import ClusterView, JobRecord, Phase


class Situation(NamedTuple):
    """Facts that must not change while a deadline of a job runs."""

    epoch: int
    plan: str
    phase: Phase | None
    stuck: bool
    unheard: frozenset[str]
    """Members and parties of the plan that no host reports. Right after an outage or loss of
    Redis these are all workers until they report again. No worker may be presumed dead for time
    that passed before."""


class Seen(NamedTuple):
    """A situation, and since when (monotonic seconds) this leader has seen it."""

    situation: Situation
    since: float


def seen(before: Seen | None, view: ClusterView, record: JobRecord, now: float) -> Seen:
    """The current situation of the job of ``record``; ``before`` is the previous one."""
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
