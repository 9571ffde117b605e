"""Derives the directive of a worker from the job's record and nothing else.

Idempotent: a second call gives the same directive, so that another call repairs a crash between two
revisions.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeGuard

from msgspec import Struct

from tmd.core.planning.migration import is_live
from tmd.core.values.model import (
    JobRecord,
    JobState,
    Member,
    Membership,
    MigrationPlan,
    Move,
    Phase,
    PlanKind,
)


class Wait(Struct, frozen=True, tag=True):
    """Hold no rank: start, then stand by. A leaver after its move, or a joiner whose plan was
    dropped, returns to the pool. A worker that trains never obeys this."""

    busy: bool = False
    """A live plan may need a standby at any moment."""


class Train(Struct, frozen=True, tag=True):
    """Hold ``rank`` of ``membership`` and train."""

    membership: Membership
    rank: int
    dropped: str = ""
    """A plan that was dropped: disarm, and report it under this name."""


class Prepare(Struct, frozen=True, tag=True):
    """Joiner: prepare to assume ``rank``. Open the links of ``membership`` and shadow ``source``
    until the vote shows that all ranks are armed."""

    plan: str
    membership: Membership
    rank: int
    source: Member
    plays: int
    """Rank of the source: usually the one that moves, else a replica of it."""
    adopted: bool = False
    """The rank is adopted: nothing of its state is local to it, so that of the source is all."""
    builds_at_switch: bool = False
    """Its inner groups are built at the switch, and not before."""


class ShadowRank(Struct, frozen=True, tag=True):
    """Standby: shadow ``rank``, either permanently (``stay``) or for one rehearsal."""

    rank: int
    size: int
    source: Member
    stay: bool
    request: str = ""
    """Id of the rehearsal request that this directive answers."""

    @property
    def plays(self) -> int:
        return self.rank


def is_rehearsal(directive: Directive) -> TypeGuard[ShadowRank]:
    """Whether ``directive`` asks for a rehearsal, not for a hot standby."""
    return isinstance(directive, ShadowRank) and not directive.stay


class HoldState(Struct, frozen=True, tag=True):
    """Standby that shadowed a rank: keep its state during a recovery."""

    plan: str
    over: bool = False
    """The shadowed worker is dead and will send nothing more; its frames so far count."""


class Arm(Struct, frozen=True, tag=True):
    """Member of the old epoch: switch to ``membership`` once the vote shows that all are armed."""

    plan: str
    membership: Membership
    moves: tuple[Move, ...]
    builds_at_switch: bool = False
    """As in :class:`Prepare`."""

    def move_of(self, worker: str) -> Move:
        """The move by which ``worker`` hands over its rank."""
        return next(m for m in self.moves if m.leaver.worker == worker)


class Hold(Struct, frozen=True, tag=True):
    """Survivor: end the current step of ``epoch``, report the committed step, and wait."""

    plan: str
    epoch: int
    hot: tuple[int, ...] = ()
    """Lost ranks whose state a hot standby may have, which replicas then verify."""
    continues: bool = False
    """A hot standby follows each of the ranks that are known to be lost: workers in the middle of
    the step may still finish it."""


class Sync(Struct, frozen=True, tag=True):
    """Get ready for step ``resume`` as ``rank`` of ``membership``.

    A survivor rolls forward or rewinds; a source sends its state to its joiners; a joiner receives.
    """

    plan: str
    membership: Membership
    rank: int
    resume: int
    moves: tuple[Move, ...]
    whole: int | None = None
    """The newest complete snapshot; no other one is needed."""
    back: bool = False
    """Restore that snapshot, which was taken at ``resume``. A worker without a copy of its rank
    fetches one from the source of its move."""
    continues: bool = False
    """Each joiner followed the rank that it takes: workers in the middle of step ``resume`` finish
    it instead of repeating it, if all can."""


class Resume(Struct, frozen=True, tag=True):
    """All are synced: train as ``rank`` of ``membership``."""

    plan: str
    membership: Membership
    rank: int


class Finish(Struct, frozen=True, tag=True):
    """A rank has ended training: an undecided worker applies its gradients and continues."""


class EndOf(StrEnum):
    """What has ended for a worker that is to leave."""

    TRAINING = "training"  # nothing is left to train, even if the job failed afterwards
    RUN = "run"  # the job failed in training: a new run may go on from a checkpoint
    WORKER = "worker"  # only this worker's part in the job, which may go on


class Leave(Struct, frozen=True, tag=True):
    """The worker is no longer needed: exit with ``code``."""

    code: int = 0
    detail: str = ""
    end_of: EndOf | None = None
    """``None``: a daemon of 0.1.0 has sent it, which does not say so."""


Directive = (
    Wait | ShadowRank | HoldState | Train | Prepare | Arm | Hold | Sync | Resume | Finish | Leave
)


def directive_of(record: JobRecord, worker: str) -> Directive:
    """The directive of ``worker`` under ``record``."""
    match record.state:
        case JobState.FAILED:
            end_of = EndOf.TRAINING if record.trained else EndOf.RUN
            return Leave(code=1, detail=record.detail, end_of=end_of)
        case JobState.FINISHED:
            return Leave(end_of=EndOf.TRAINING)
        case JobState.FINISHING:
            if record.membership.rank_of(worker) is not None:
                return Finish()
            return Leave(end_of=EndOf.TRAINING)
        case JobState.RUNNING:
            pass
    plan = record.plan
    if plan is not None and is_live(plan):
        found = (
            _in_planned(plan, worker)
            if plan.kind is PlanKind.PLANNED
            else _in_failover(record, plan, worker)
        )
        if found is not None:
            return found
    rank = record.membership.rank_of(worker)
    if rank is not None:
        return Train(membership=record.membership, rank=rank)
    return _outside(record, worker)


def _in_planned(plan: MigrationPlan, worker: str) -> Directive | None:
    move = next((m for m in plan.moves if m.joiner and m.joiner.worker == worker), None)
    if move is not None and plan.phase is not Phase.DISARM:
        source = move.source or move.leaver
        plays = plan.old.rank_of(source.worker)
        assert plays is not None, "a planned move has its source in the old membership"
        adopted = move.rank in plan.old.adopted
        at_switch = bool(plan.builds_at_switch)
        return Prepare(plan.id, plan.new, move.rank, source, plays, adopted, at_switch)
    rank = plan.old.rank_of(worker)
    if rank is None:
        return None
    if plan.phase in (Phase.READY, Phase.SWITCH):
        at_switch = bool(plan.builds_at_switch)
        return Arm(plan.id, plan.new, plan.moves, at_switch)
    dropped = plan.id if plan.phase is Phase.DISARM else ""
    return Train(membership=plan.old, rank=rank, dropped=dropped)


def _in_failover(record: JobRecord, plan: MigrationPlan, worker: str) -> Directive | None:
    if worker in plan.dead:
        return _named_dead(plan)
    rank = plan.new.rank_of(worker)
    match plan.phase:
        case Phase.RECOVER:
            witness = any(m.worker == worker for m in plan.witnesses)
            lost = tuple(m.rank for m in plan.moves)
            shadowed = any(u.stay for u in record.shadows)
            hot = lost if shadowed else ()
            continues = shadowed and _followed(record, plan)
            return Hold(plan.id, plan.old.epoch, hot, continues) if witness else None
        case Phase.SYNC if rank is not None and plan.resume is not None:
            return Sync(
                plan=plan.id,
                membership=plan.new,
                rank=rank,
                resume=plan.resume,
                moves=plan.moves,
                whole=plan.whole,
                back=plan.rollback is not None,
                continues=bool(plan.moves) and _followed(record, plan) and plan.rollback is None,
            )
        case Phase.RESUME if rank is not None:
            return Resume(plan=plan.id, membership=plan.new, rank=rank)
    return None


def _followed(record: JobRecord, plan: MigrationPlan) -> bool:
    """Whether a hot standby follows each lost rank, and is its joiner if that is decided."""
    hot = {u.rank: u.member for u in record.shadows if u.stay}
    # A shadow that has become the rank, and gives it back, follows it no more.
    return not (plan.old.adopted or plan.new.adopted) and all(
        m.rank in hot and m.joiner in (None, hot[m.rank]) and m.leaver != hot[m.rank]
        for m in plan.moves
    )


def _outside(record: JobRecord, worker: str) -> Directive:
    """Directive of a worker without rank: the last plan that moved it away decides if it stays."""
    for plan in reversed(record.history):
        if plan.phase is not Phase.DONE:
            continue
        if any(m.joiner and m.joiner.worker == worker for m in plan.moves):
            break
        if worker in plan.dead:
            return _named_dead(plan)
        if plan.leave and any(m.leaver.worker == worker for m in plan.moves):
            return Leave(detail=f"drained by plan {plan.id}", end_of=EndOf.WORKER)
    if worker in record.dismissed and not is_live(record.plan):
        return Leave(detail="its host is drained with --leave", end_of=EndOf.WORKER)
    return _following(record, worker)


def _named_dead(plan: MigrationPlan) -> Leave:
    detail = f"named dead by plan {plan.id}: {plan.reason}"
    return Leave(code=1, detail=detail, end_of=EndOf.WORKER)


def _following(record: JobRecord, worker: str) -> Directive:
    """Directive of a worker of the pool, which may be a hot standby or rehearse."""
    study = next((u for u in record.shadows if u.member.worker == worker), None)
    plan = record.plan
    if study is None:
        return Wait(busy=is_live(plan))
    source = record.membership.members[study.rank]
    if (
        plan is not None
        and plan.kind is PlanKind.FAILOVER
        and plan.phase in (Phase.RECOVER, Phase.SYNC)
    ):
        # A shadow ends when all ranks return to a snapshot.
        return HoldState(plan.id, source.worker in plan.dead) if plan.rollback is None else Wait()
    return ShadowRank(
        rank=study.rank,
        size=record.world_size,
        source=source,
        stay=study.stay,
        request=study.request,
    )
