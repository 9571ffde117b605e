"""Decides the resume step and the owner of each rank after a loss.

Every worker that may hold the state of a rank halts and reports its step. The resume step is the
highest committed step among them; a worker that is one step behind was undecided in its vote and
applies its own complete gradients. A rank belongs to the halted worker that claims it in the
highest epoch. A rank without a claim goes to a standby, which copies a replica. Without a replica
it goes to a standby that has shadowed it, and if there is none all ranks return to the newest
snapshot (:mod:`tmd.core.planning.rollback`). Without a standby a survivor may adopt the rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from tmd.core.planning.adoption import adopted, refusal
from tmd.core.planning.migration import PlanEvent, PlanFacts, is_live, transition
from tmd.core.planning.plan_history import shortened
from tmd.core.planning.rollback import Cast, cast_back, newest_of
from tmd.core.planning.standby_reasons import shortfall, the_first
from tmd.core.planning.standbys import assigned, drained_for, line
from tmd.core.values.checkpoints import advice
from tmd.core.values.model import (
    Activity,
    JobRecord,
    JobState,
    Mark,
    Member,
    Membership,
    MigrationPlan,
    Move,
    Phase,
    PlanKind,
    WorkerStatus,
)

HOLDER_OFFSETS = (1, 2)
"""Ranks ``r + 1`` and ``r + 2`` store copies of the rank-local state of rank ``r``."""


def keepers_first(rank: int, size: int) -> tuple[int, ...]:
    """All other ranks, in the order in which they are preferred as source of ``rank``."""
    offsets = dict.fromkeys((*HOLDER_OFFSETS, *range(1, size)))
    return tuple((rank + o) % size for o in offsets if o % size)


def open_failover(
    record: JobRecord, dead: Sequence[str], cause: str, reason: str, policy: str, now: float
) -> JobRecord:
    """Name ``dead`` in the live failover if there is one, else in a new one.

    A live planned migration is dropped; its parties may hold state and become witnesses.
    """
    live = record.plan if record.plan is not None and is_live(record.plan) else None
    if live and live.kind is PlanKind.FAILOVER and live.phase is not Phase.RESUME:
        return _extended(record, live, dead, cause, reason, now)
    members = record.membership.members
    witnesses = members
    # Until members are armed no joiner can have taken a rank.
    if live and live.kind is PlanKind.PLANNED and live.phase is not Phase.PREPARE:
        parties = (*live.new.members, *(m.leaver for m in live.moves))
        witnesses = (*members, *(p for p in dict.fromkeys(parties) if p not in members))
    epoch = record.proposed + 1
    plan = MigrationPlan(
        id=f"{record.job}-{epoch}",
        kind=PlanKind.FAILOVER,
        phase=Phase.RECOVER,
        moves=_open_moves(record, dead),
        old=record.membership,
        new=structs.replace(record.membership, epoch=epoch),
        cause=cause,
        reason=reason,
        policy=policy,
        dead=tuple(dead),
        witnesses=witnesses,
        timeline=(Mark(Phase.RECOVER, now),),
    )
    if live:
        outcome = f"overtaken by {plan.id}: {reason}"
        record = archived(record, transition(live, PlanEvent.MEMBER_LOST, now, outcome))
    return structs.replace(record, plan=plan, proposed=epoch)


def archived(record: JobRecord, plan: MigrationPlan) -> JobRecord:
    """``record`` with the final ``plan`` in its history.

    The history keeps only the epochs of the plan's memberships, and which ranks were adopted. A
    membership of 16,384 ranks takes a megabyte, and all hosts of a job read its record.
    """
    kept = structs.replace(
        plan,
        old=Membership(plan.old.epoch, ()),
        new=Membership(plan.new.epoch, (), plan.new.adopted),
        witnesses=(),
    )
    return structs.replace(record, plan=plan, history=shortened((*record.history, kept)))


def reopened(
    record: JobRecord,
    plan: MigrationPlan,
    event: PlanEvent,
    reason: str,
    now: float,
    *,
    rejected: Sequence[str] = (),
    late: Sequence[str] = (),
) -> JobRecord:
    """Return to RECOVER, without the ``rejected`` joiners and with the ``late`` ones last."""
    plan = structs.replace(
        transition(plan, event, now, reason),
        rejected=tuple(dict.fromkeys((*plan.rejected, *rejected))),
        late=tuple(dict.fromkeys((*plan.late, *late))),
        moves=_open_moves(record, plan.dead),
        resume=None,
    )
    return structs.replace(record, plan=plan)


def settle(
    record: JobRecord,
    plan: MigrationPlan,
    facts: PlanFacts,
    candidates: Sequence[Member],
    now: float,
) -> tuple[JobRecord, str]:
    """From RECOVER to SYNC once all facts are known; else ``record`` and the missing fact.

    A job without a remaining worker has failed.
    """
    settled, missing = _settled(record, plan, facts, candidates, now)
    ending = facts.ending((*plan.dead, *(m.worker for m in plan.witnesses)))
    if settled.state is JobState.FAILED and ending:
        # A worker that finished training ends well, and so does the job.
        return record, f"waiting for the exit status of {ending}"
    return settled, missing


def _settled(
    record: JobRecord,
    plan: MigrationPlan,
    facts: PlanFacts,
    candidates: Sequence[Member],
    now: float,
) -> tuple[JobRecord, str]:
    alive = _alive(plan, facts)
    if late := [m.worker for m in alive if not _halted(plan, facts, m.worker)]:
        return record, f"waiting for {the_first(late)} to halt"
    stuck = [m for m in alive if facts.doing(m.worker, Activity.STUCK, plan.id)]
    claims = [(m, facts.status[m.worker]) for m in stuck]
    if not claims:
        detail = f"no survivor holds the state: {_advice(facts)}"
        return structs.replace(record, state=JobState.FAILED, detail=detail), ""
    resume = max(plan.floor, *(status.step for _, status in claims))
    owners = _owners(record, claims)
    fit = [c for c in candidates if c.worker not in plan.rejected and c not in owners.values()]
    spare = sorted(fit, key=lambda c: c.worker in plan.late)  # the first shadow is taken
    # After a rollback was ordered no rank goes on from its step, though a status may still show it.
    lost: tuple[int, ...] = ()
    if plan.rollback is None:
        # A leaver claims its rank, but its joiner committed with the others before it died: a
        # replica's state is ahead of its own.
        able = {r: m for r, m in owners.items() if _reaches(facts.status[m.worker], resume)}
        cast = _cast(spare, able, record.world_size, facts, resume, plan.late)
        lost = cast.lost
        owners = owners if lost else able  # a rollback needs no state of the step
    if plan.rollback is not None or lost:
        cast, back = cast_back(spare, owners, record.world_size, facts, resume, plan)
        if back is None:
            return _lost(record, facts, lost or cast.lost, resume)
        plan, resume = structs.replace(plan, rollback=back, how=back.sentence), back.step
    adopters, missing = _adopters(record, plan, facts, cast, owners)
    if missing:
        return record, missing
    membership = record.membership.replaced({**owners, **cast.joiners}, plan.new.epoch)
    plan = structs.replace(
        transition(plan, PlanEvent.HALTED, now),
        new=membership.shrunk(adopters),
        moves=_moves(record, cast.joiners, owners, cast.sources),
        resume=resume,
        floor=resume,
        whole=newest_of(record.world_size, owners.values(), facts),
    )
    return structs.replace(record, plan=plan, detail=""), ""


def _adopters(
    record: JobRecord,
    plan: MigrationPlan,
    facts: PlanFacts,
    cast: Cast,
    owners: dict[int, Member],
) -> tuple[dict[int, int], str]:
    """By rank without a standby, the rank whose holder adopts it; or why the job waits for one."""
    missing = cast.missing or _vacant(record, plan, facts, cast.vacant)
    if not cast.vacant or plan.rollback is not None:
        return {}, missing
    why = refusal(facts.view, [facts.status[m.worker] for m in owners.values()])
    if why is None:
        return {}, missing
    if why:
        return {}, f"{missing}; and no other rank can compute for it: {why}"
    return adopted(cast.vacant, owners), ""


def _vacant(record: JobRecord, plan: MigrationPlan, facts: PlanFacts, ranks: Sequence[int]) -> str:
    """Why ``ranks`` wait for a standby; empty if there are no ``ranks``."""
    if not ranks:
        return ""
    why = shortfall(ranks, facts.view, record, facts, left_out=plan.rejected)
    return f"no standby for rank {', '.join(map(str, ranks))}: {why}"


def _cast(
    spare: Sequence[Member],
    owners: dict[int, Member],
    size: int,
    facts: PlanFacts,
    resume: int,
    late: Sequence[str],
) -> Cast:
    vacant = [rank for rank in range(size) if rank not in owners]
    sources = {rank: _source(rank, owners, size, facts) for rank in vacant}
    kept: dict[int, Member] = {}
    for rank in (rank for rank, source in sources.items() if source is None):
        shadow = _shadow(rank, spare, facts, resume)
        if shadow is not None:
            kept[rank] = shadow
    lost = tuple(r for r, source in sources.items() if source is None and r not in kept)
    unready = [m.worker for m in kept.values() if not _has_state(facts, m, resume)]
    others = [rank for rank in vacant if rank not in kept]
    left = [c for c in spare if c not in kept.values()]
    if lost:
        return Cast(lost=lost)
    if unready:
        return Cast(missing=f"waiting for {unready[0]}, the only one that has the state of a rank")
    joiners = assigned(others, left, facts, late=late)
    if open_ranks := tuple(rank for rank in others if rank not in joiners):
        return Cast({**joiners, **kept}, sources, vacant=open_ranks)
    return Cast({**joiners, **kept}, sources)


def unheard(plan: MigrationPlan, facts: PlanFacts) -> tuple[str, ...]:
    """Witnesses without a report, if all others have halted."""
    alive = _alive(plan, facts)
    silent = tuple(m.worker for m in alive if m.worker not in facts.status)
    halted = all(_halted(plan, facts, m.worker) for m in alive if m.worker not in silent)
    return silent if halted else ()


def _extended(
    record: JobRecord,
    plan: MigrationPlan,
    dead: Sequence[str],
    cause: str,
    reason: str,
    now: float,
) -> JobRecord:
    if not plan.dead:
        # It was opened for a broken link, whose cause is known now.
        plan = structs.replace(plan, cause=cause, reason=reason)
    named = tuple(dict.fromkeys((*plan.dead, *dead)))
    plan = structs.replace(
        transition(plan, PlanEvent.MEMBER_LOST, now),
        dead=named,
        # A synced joiner holds a state, so it must halt as well.
        witnesses=tuple(dict.fromkeys((*plan.witnesses, *plan.new.members))),
        moves=_open_moves(record, named),
        resume=None,
    )
    return structs.replace(record, plan=plan)


def _open_moves(record: JobRecord, dead: Sequence[str]) -> tuple[Move, ...]:
    members = record.membership.members
    return tuple(Move(rank=r, leaver=m) for r, m in enumerate(members) if m.worker in dead)


def _alive(plan: MigrationPlan, facts: PlanFacts) -> list[Member]:
    """Witnesses not known to have ended, each once whatever number of ranks it holds."""
    return [
        m
        for m in dict.fromkeys(plan.witnesses)
        if m.worker not in plan.dead and facts.exited(m.worker) is None
    ]


def _halted(plan: MigrationPlan, facts: PlanFacts, worker: str) -> bool:
    status = facts.status.get(worker)
    if status is None:
        return False
    # A joiner without a state has returned to the pool.
    return status.activity is Activity.STANDBY or facts.doing(worker, Activity.STUCK, plan.id)


def _reaches(status: WorkerStatus, resume: int) -> bool:
    return status.step == resume or (status.undecided and status.step + 1 == resume)


def _owners(record: JobRecord, claims: Sequence[tuple[Member, WorkerStatus]]) -> dict[int, Member]:
    owners: dict[int, tuple[int, Member]] = {}
    for member, status in claims:
        if status.rank is None or not 0 <= status.rank < record.world_size:
            continue
        best = owners.get(status.rank)
        if best is None or status.epoch > best[0]:
            owners[status.rank] = (status.epoch, member)
    return {rank: member for rank, (_, member) in owners.items()}


def _moves(
    record: JobRecord,
    joiners: dict[int, Member],
    owners: dict[int, Member],
    sources: dict[int, Member | None],
) -> tuple[Move, ...]:
    moves = []
    kept = {owner.worker for owner in owners.values()}
    for rank, before in enumerate(record.membership.members):
        if rank in joiners:
            # It may be the owner itself, which lacks only the copy for the rollback.
            move = Move(rank=rank, leaver=before, joiner=joiners[rank], source=sources[rank])
            moves.append(move)
        elif rank not in owners:
            if before.worker not in kept:  # else it is adopted by the same worker again
                moves.append(Move(rank=rank, leaver=before))
        elif owners[rank] != before:
            moves.append(Move(rank=rank, leaver=before, joiner=owners[rank]))
    return tuple(moves)


def _source(rank: int, owners: dict[int, Member], size: int, facts: PlanFacts) -> Member | None:
    """The replica that stores the rank's own buffers; else any, the usual keepers first."""
    others = [owners[r] for r in keepers_first(rank, size) if r in owners]
    found = [m for m in others if rank in facts.status[m.worker].replicas]
    keeper = next((m for m in found if rank in facts.status[m.worker].holds), None)
    return keeper or next(iter(found), None)


def _shadow(rank: int, spare: Sequence[Member], facts: PlanFacts, resume: int) -> Member | None:
    """A standby that has, or may prove to have, the state of ``rank`` at ``resume``."""
    for member in spare:
        status = facts.status[member.worker]
        shadow = status.shadow
        if shadow is None or shadow.rank != rank or shadow.verified is None:
            continue
        if status.activity is not Activity.STANDBY or _reaches(status, resume):
            return member
    return None


def _kept_by_drained(record: JobRecord, facts: PlanFacts, ranks: Sequence[int], resume: int) -> str:
    """Why the plan waits: a standby on a drained host has the state of one of ``ranks``. Empty if
    none has."""
    drained = drained_for(record, facts.view)
    for standby in line(facts.view, record, facts):
        if standby.member.host not in drained or facts.failing(standby.member.worker):
            continue
        for rank in ranks:
            if _shadow(rank, [standby.member], facts, resume) is not None:
                worker = standby.member.worker
                return f"only {worker} has the state of rank {rank}, and {standby.refusal}"
    return ""


def _has_state(facts: PlanFacts, shadow: Member, resume: int) -> bool:
    status = facts.status[shadow.worker]
    return status.activity is Activity.STANDBY and _reaches(status, resume)


def _advice(facts: PlanFacts) -> str:
    return advice(status.saved for status in facts.status.values())


def _lost(
    record: JobRecord, facts: PlanFacts, ranks: Sequence[int], resume: int
) -> tuple[JobRecord, str]:
    """The job has failed, unless an operator can return the state."""
    if kept := _kept_by_drained(record, facts, ranks, resume):
        return record, kept
    names = ", ".join(str(rank) for rank in ranks)
    detail = (
        f"the state of rank {names} is lost without a replica or a complete snapshot: "
        f"{_advice(facts)}"
    )
    return structs.replace(record, state=JobState.FAILED, detail=detail), ""
