"""Determines how much training time a job loses, and to what. Pure; the leader adds it up.

Lost time is counted in seconds of rank time: a job of 8 ranks that stands still for one second
loses 8 rank seconds. Work that is done again counts as lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from itertools import pairwise
from statistics import median

from msgspec import Struct

from tmd.core.planning.migration import STOPPED, PlanFacts, is_live
from tmd.core.planning.standbys import assigned, candidates
from tmd.core.values.model import (
    FINAL,
    ClusterView,
    JobRecord,
    JobState,
    MigrationPlan,
    Phase,
    PlanKind,
)


class LossCause(StrEnum):
    """Why a job makes no progress."""

    PLANNED_MOVE = "planned_move"  # from the vote of the switch to the first commit after it
    INTERRUPTED_STEP = "interrupted_step"  # from the last commit to the plan of the failover
    FAILOVER = "failover"  # from the plan of a failover to the first commit after it
    HOLD = "hold"  # a failover waits for a standby, or for the end of a pause
    REPEATED_STEPS = "repeated_steps"  # committed steps that are run again after a rollback


class LostTime(Struct, frozen=True):
    """Lost time of one cause."""

    cause: LossCause
    rank_seconds: float


class PhaseTime(Struct, frozen=True):
    """How long a plan was in a phase that it has left."""

    kind: PlanKind
    phase: Phase
    seconds: float


def standstill(record: JobRecord, view: ClusterView) -> LossCause | None:
    """Why no rank of the job makes progress now; ``None`` if some may."""
    plan = record.plan
    if record.state is not JobState.RUNNING:
        return None
    if plan is None or not is_live(plan):
        return LossCause.HOLD if record.detail == STOPPED else None
    if plan.kind is PlanKind.PLANNED:
        return LossCause.PLANNED_MOVE if plan.phase is Phase.SWITCH else None
    holds = plan.phase is Phase.RECOVER and _waits_for_standby(record, plan, view)
    return LossCause.HOLD if holds else LossCause.FAILOVER


def losses(before: JobRecord | None, after: JobRecord, view: ClusterView) -> tuple[LostTime, ...]:
    """Time that is known to be lost once the record becomes ``after``; see also ``standstill``."""
    plan = after.plan
    held = before is not None and before.detail == STOPPED
    if after.detail == STOPPED and not held:
        # Which rank is lost is not in the record. One that is frozen reports what was long ago.
        known = view.workers(after.job)
        stood = max((known[w].stands_s for w in after.membership.workers if w in known), default=0)
        return (LostTime(LossCause.INTERRUPTED_STEP, stood * after.world_size),)
    if plan is None or plan.kind is not PlanKind.FAILOVER or not is_live(plan):
        return ()
    earlier = None if before is None else before.plan
    if earlier is not None and earlier.id != plan.id:
        earlier = None
    found = []
    if earlier is None and not held:  # else it was counted when the pause began to hold the plan
        stood = _since_last_commit(after, plan, view)
        found.append(LostTime(LossCause.INTERRUPTED_STEP, stood * after.world_size))
    if plan.rollback is not None and (earlier is None or earlier.rollback is None):
        seconds = plan.rollback.repeats * step_seconds(after, view)
        found.append(LostTime(LossCause.REPEATED_STEPS, seconds * after.world_size))
    return tuple(found)


def phases_left(before: JobRecord | None, after: JobRecord) -> tuple[PhaseTime, ...]:
    """The phases that the live plan of ``before`` has left in ``after``."""
    plan, now = _successor(before, after)
    if plan is None or now is None:
        return ()
    marks = now.timeline[max(0, len(plan.timeline) - 1) :]
    return tuple(
        PhaseTime(plan.kind, old.phase, max(0.0, new.at - old.at)) for old, new in pairwise(marks)
    )


def ended(before: JobRecord | None, after: JobRecord) -> MigrationPlan | None:
    """The plan that was live in ``before`` and is final in ``after``."""
    _, now = _successor(before, after)
    return now if now is not None and now.phase in FINAL else None


def _successor(
    before: JobRecord | None, after: JobRecord
) -> tuple[MigrationPlan | None, MigrationPlan | None]:
    """The live plan of ``before``, and what it is in ``after``."""
    plan = None if before is None else before.plan
    if plan is None or not is_live(plan):
        return None, None
    # Another plan may have overtaken it in the same revision.
    later = [after.plan, *reversed(after.history)]
    return plan, next((p for p in later if p is not None and p.id == plan.id), None)


def _waits_for_standby(record: JobRecord, plan: MigrationPlan, view: ClusterView) -> bool:
    facts = PlanFacts(view, record.job)
    spare = [m for m in candidates(view, record, facts) if m.worker not in plan.rejected]
    vacant = [move.rank for move in plan.moves if move.joiner is None]
    return len(assigned(vacant, spare, facts)) < len(vacant)


def _since_last_commit(record: JobRecord, plan: MigrationPlan, view: ClusterView) -> float:
    """Seconds since a survivor last committed, by the latest reports; 0 if none reports."""
    known = view.workers(record.job)
    alive = (m.worker for m in record.membership.members if m.worker not in plan.dead)
    return min((known[w].stands_s for w in alive if w in known), default=0.0)


def step_seconds(record: JobRecord, view: ClusterView) -> float:
    """The median duration of the latest step over all ranks, 0 if none has made one."""
    return median([*_reported_steps(record, view)] or [0.0])


def _reported_steps(record: JobRecord, view: ClusterView) -> Iterator[float]:
    known = view.workers(record.job)
    for member in record.membership.members:
        status = known.get(member.worker)
        if status is not None and status.step_seconds > 0:
            yield status.step_seconds
