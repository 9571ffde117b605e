"""Opening a planned move: all ranks of one host at once, each to a standby, or none."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from tmd.core.migration import Facts, is_live
from tmd.core.model import (
    Activity,
    ClusterView,
    JobRecord,
    JobState,
    Kind,
    Mark,
    Member,
    MigrationPlan,
    Move,
    Phase,
    Urgency,
    Verdict,
)
from tmd.core.sources import source_of
from tmd.core.standbys import assigned, candidates, lasting, reasons, refused_here, shortfall


def planned(
    record: JobRecord, view: ClusterView, facts: Facts, verdicts: Sequence[Verdict], now: float
) -> JobRecord | None:
    """``record`` with a planned move opened, or with what it waits for; ``None`` if nobody is to be
    moved now."""
    if is_live(record.plan) or record.state is not JobState.RUNNING:
        return None
    wanted = [v for v in verdicts if v.urgency is Urgency.DRAIN and v.job == record.job]
    by_worker = {v.worker: v for v in wanted}
    leavers = [(r, m) for r, m in enumerate(record.membership.members) if m.worker in by_worker]
    if not leavers or not all(_calm(facts, m.worker) for m in record.membership.members):
        return None
    host = leavers[0][1].host
    leavers = [(r, m) for r, m in leavers if m.host == host]
    joiners, waits = _joiners(record, view, facts, host, [r for r, _ in leavers])
    if waits:
        return structs.replace(record, detail=waits)
    moves = tuple(
        Move(rank=r, leaver=m, joiner=joiners[r], source=source_of(record, view, facts, r, m))
        for r, m in leavers
    )
    refused = refused_here(record, host)
    choice = reasons(joiners, view, record, facts, left_out=sorted(refused))
    return _open_planned(record, moves, by_worker[leavers[0][1].worker], choice, now)


def hindrance(record: JobRecord, view: ClusterView, host: str) -> str:
    """Why the ranks on ``host`` cannot be moved off it now: standbys are lacking. Empty if they
    can, or if a plan is under way."""
    if is_live(record.plan) or record.state is not JobState.RUNNING:
        return ""
    ranks = [r for r, m in enumerate(record.membership.members) if m.host == host]
    return _joiners(record, view, Facts(view, record.job), host, ranks)[1]


def _joiners(
    record: JobRecord, view: ClusterView, facts: Facts, host: str, ranks: Sequence[int]
) -> tuple[dict[int, Member], str]:
    """A standby for each of ``ranks``, which are on ``host``; and what a move has to wait for."""
    refused = refused_here(record, host)
    fit = lasting(view, candidates(view, record, facts))
    spare = [c for c in fit if c.worker not in refused]
    found = assigned(ranks, spare, facts, idle_first=True)
    short = [r for r in ranks if r not in found]
    if not short:
        return found, ""
    why = shortfall(short, view, record, facts, left_out=sorted(refused), lasts=True)
    return found, f"moving the ranks of {host} waits for {len(short)} standby: {why}"


def _open_planned(
    record: JobRecord,
    moves: tuple[Move, ...],
    verdict: Verdict,
    choice: tuple[str, ...],
    now: float,
) -> JobRecord:
    epoch = record.proposed + 1
    changes = {m.rank: m.joiner for m in moves if m.joiner}
    plan = MigrationPlan(
        id=f"{record.job}-{epoch}",
        kind=Kind.PLANNED,
        phase=Phase.PREPARE,
        moves=moves,
        old=record.membership,
        new=record.membership.replaced(changes, epoch),
        cause=verdict.cause,
        reason=verdict.reason,
        policy=verdict.policy,
        leave=verdict.leave,
        request=verdict.request,
        choice=choice,
        timeline=(Mark(Phase.PREPARE, now),),
    )
    return structs.replace(record, plan=plan, proposed=epoch, detail="")


def _calm(facts: Facts, worker: str) -> bool:
    status = facts.status.get(worker)
    return status is not None and status.activity is Activity.TRAINING and status.step > 0
