"""Opens a planned move: all ranks of one host at once, each to a standby, or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import structs

from tmd.core.alerts.findings import GRAVE
from tmd.core.planning.adoption import growth
from tmd.core.planning.migration import PlanFacts, is_live
from tmd.core.planning.readiness import SHRUNK
from tmd.core.planning.standby_reasons import reasons, shortfall
from tmd.core.planning.standbys import assigned, candidates, lasting, refused_here
from tmd.core.values.model import (
    Activity,
    ClusterView,
    JobRecord,
    JobState,
    Mark,
    Member,
    MigrationPlan,
    Move,
    Phase,
    PlanKind,
    Urgency,
    Verdict,
)


def planned(
    record: JobRecord, view: ClusterView, facts: PlanFacts, verdicts: Sequence[Verdict], now: float
) -> JobRecord | None:
    """``record`` with a planned move opened, or with the reason to wait; ``None`` if no move is
    wanted now."""
    if is_live(record.plan) or record.state is not JobState.RUNNING:
        return None
    wanted = [v for v in verdicts if v.urgency is Urgency.DRAIN and v.job == record.job]
    # The verdict that serves a request wins: it says whether the leaver exits afterwards.
    by_worker = {v.worker: v for v in sorted(wanted, key=lambda v: bool(v.request))}
    leavers = [(r, m) for r, m in enumerate(record.membership.members) if m.worker in by_worker]
    if leavers and record.membership.adopted:
        waits = f"moving the ranks of {leavers[0][1].host} waits until no rank is adopted"
        return structs.replace(record, detail=waits)
    if not leavers or not all(_calm(facts, m.worker) for m in record.membership.members):
        return None
    obstacles = []
    for host in _in_turn([m for _, m in leavers], by_worker):
        leaving = [(r, m) for r, m in leavers if m.host == host]
        joiners, waits = _joiners(record, view, facts, host, [r for r, _ in leaving])
        if waits:
            obstacles.append(waits)
            continue
        moves = tuple(
            Move(rank=r, leaver=m, joiner=joiners[r], source=source_of(record, view, facts, r, m))
            for r, m in leaving
        )
        refused = refused_here(record, host)
        choice = reasons(joiners, view, record, facts, left_out=sorted(refused))
        return _open_planned(record, moves, by_worker[leaving[0][1].worker], choice, now)
    return structs.replace(record, detail=obstacles[0])


def _in_turn(leavers: Sequence[Member], by_worker: Mapping[str, Verdict]) -> Iterable[str]:
    """The hosts of ``leavers`` in the order in which they are tried: requested moves first."""
    ordered = sorted(leavers, key=lambda m: not by_worker[m.worker].request)
    return dict.fromkeys(m.host for m in ordered)


def grown(record: JobRecord, view: ClusterView, facts: PlanFacts, now: float) -> JobRecord | None:
    """``record`` with a move of adopted ranks to standbys opened; ``None`` if there is none."""
    moves, joiners = growth(record, view, facts)
    if not moves:
        return None
    names = ", ".join(str(move.rank) for move in moves)
    verdict = Verdict(
        job=record.job,
        worker=moves[0].leaver.worker,
        urgency=Urgency.DRAIN,
        cause=SHRUNK,
        reason=f"a standby can take rank {names}, which another rank has adopted",
    )
    return _open_planned(record, moves, verdict, reasons(joiners, view, record, facts), now)


def obstacle(record: JobRecord, view: ClusterView, host: str) -> str:
    """Why the ranks on ``host`` cannot move now, for lack of standbys. Empty if they can, or while
    a plan is live."""
    if is_live(record.plan) or record.state is not JobState.RUNNING:
        return ""
    ranks = [r for r, m in enumerate(record.membership.members) if m.host == host]
    return _joiners(record, view, PlanFacts(view, record.job), host, ranks)[1]


def _joiners(
    record: JobRecord, view: ClusterView, facts: PlanFacts, host: str, ranks: Sequence[int]
) -> tuple[dict[int, Member], str]:
    """A standby for each of ``ranks``, which are on ``host``, or the reason to wait."""
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
        kind=PlanKind.PLANNED,
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


def _calm(facts: PlanFacts, worker: str) -> bool:
    status = facts.status.get(worker)
    return status is not None and status.activity is Activity.TRAINING and status.step > 0


def source_of(
    record: JobRecord, view: ClusterView, facts: PlanFacts, rank: int, leaver: Member
) -> Member:
    """The source of the joiner's state: the leaver, or a replica if its host is unsound."""
    if not _ails(view, leaver.host):
        return leaver
    members = enumerate(record.membership.members)
    replicas = [
        m
        for r, m in members
        if r != rank and r in facts.status[leaver.worker].replicas and not _ails(view, m.host)
    ]
    # Rank 0 last, since scripts print and save there.
    return next(reversed(replicas), leaver)


def _ails(view: ClusterView, name: str) -> bool:
    host = view.host(name)
    return host is not None and any(a.severity in GRAVE for a in host.alerts)
