"""What a worker must do now, derived from the record and nothing else.

Idempotent by construction: asking twice gives the same duty, and a crash anywhere between two
revisions is mended by asking again.
"""

from __future__ import annotations

from tmd.core.migration import is_live
from tmd.core.model import (
    Arm,
    Duty,
    Finish,
    Hold,
    JobRecord,
    JobState,
    Kind,
    Leave,
    MigrationPlan,
    Phase,
    Prepare,
    Resume,
    Sync,
    Train,
    Wait,
)


def duty(record: JobRecord, worker: str) -> Duty:
    """The duty of ``worker`` under ``record``."""
    match record.state:
        case JobState.FAILED:
            return Leave(code=1, detail=record.detail)
        case JobState.FINISHED:
            return Leave()
        case JobState.FINISHING:
            return Finish() if record.membership.rank_of(worker) is not None else Leave()
        case JobState.RUNNING:
            pass
    plan = record.plan
    if plan is not None and is_live(plan):
        found = (
            _in_planned(plan, worker) if plan.kind is Kind.PLANNED else _in_failover(plan, worker)
        )
        if found is not None:
            return found
    rank = record.membership.rank_of(worker)
    if rank is not None:
        return Train(membership=record.membership, rank=rank)
    return _outside(record, worker)


def _in_planned(plan: MigrationPlan, worker: str) -> Duty | None:
    joins = {m.joiner.worker: m.rank for m in plan.moves if m.joiner}
    if worker in joins and plan.phase is not Phase.DISARM:
        return Prepare(plan=plan.id, membership=plan.new, rank=joins[worker])
    rank = plan.old.rank_of(worker)
    if rank is None:
        return None
    if plan.phase in (Phase.READY, Phase.SWITCH):
        return Arm(plan=plan.id, membership=plan.new, moves=plan.moves)
    return Train(membership=plan.old, rank=rank)


def _in_failover(plan: MigrationPlan, worker: str) -> Duty | None:
    if worker in plan.dead:
        return Leave(code=1, detail=f"named dead by plan {plan.id}: {plan.reason}")
    rank = plan.new.rank_of(worker)
    match plan.phase:
        case Phase.RECOVER:
            witness = any(m.worker == worker for m in plan.witnesses)
            return Hold(plan=plan.id, epoch=plan.old.epoch) if witness else None
        case Phase.SYNC if rank is not None and plan.resume is not None:
            return Sync(
                plan=plan.id,
                membership=plan.new,
                rank=rank,
                resume=plan.resume,
                moves=plan.moves,
            )
        case Phase.RESUME if rank is not None:
            return Resume(plan=plan.id, membership=plan.new, rank=rank)
    return None


def _outside(record: JobRecord, worker: str) -> Duty:
    """A worker without rank: the last plan that moved it away says whether it may stay."""
    for plan in reversed(record.history):
        if plan.phase is not Phase.DONE:
            continue
        if any(m.joiner and m.joiner.worker == worker for m in plan.moves):
            break
        if worker in plan.dead:
            return Leave(code=1, detail=f"named dead by plan {plan.id}: {plan.reason}")
        if plan.leave and any(m.leaver.worker == worker for m in plan.moves):
            return Leave(detail=f"drained by plan {plan.id}")
    return Wait()
