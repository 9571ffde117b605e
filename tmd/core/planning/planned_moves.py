"""Opens a planned move: all ranks of one host at once, each to a standby, or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf

from msgspec import structs

from tmd.core.alerts.findings import GRAVE
from tmd.core.planning.adoption import growth
from tmd.core.planning.migration import STOPPED, PlanFacts, is_live
from tmd.core.planning.readiness import SHRUNK
from tmd.core.planning.standby_reasons import reasons, shortfall
from tmd.core.planning.standbys import (
    assigned,
    candidates,
    lasting,
    refused_here,
    undrained,
)
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

PAUSE_S, LONGEST_PAUSE_S = 10.0, 600.0
"""After a move that was dropped, until the same is tried again: the first pause, which doubles
with each further one, and the longest."""
JUST_S = 5.0
"""A rank that has stood at one step for less than this has just committed one."""
SILENT_S = 10.0
"""Silence of a member for which a planned move waits without saying so."""


def planned(
    record: JobRecord,
    view: ClusterView,
    facts: PlanFacts,
    verdicts: Sequence[Verdict],
    now: float,
    age: float,
) -> JobRecord | None:
    """``record`` with a planned move opened, or with the reason to wait, or without it once no
    move is wanted; ``None`` if nothing changes.

    ``age``: seconds (monotonic) since the last plan ended."""
    if is_live(record.plan) or record.state is not JobState.RUNNING:
        return None
    if view.paused and record.detail == STOPPED and not _progresses(record, facts):
        return None  # the verdict that a pause holds may be missing for a moment
    wanted = [v for v in verdicts if v.urgency is Urgency.DRAIN and v.job == record.job]
    # The verdict that serves a request wins: it says whether the leaver exits afterwards.
    by_worker = {v.worker: v for v in sorted(wanted, key=lambda v: bool(v.request))}
    leavers = [(r, m) for r, m in enumerate(record.membership.members) if m.worker in by_worker]
    if leavers and record.membership.adopted:
        waits = f"moving the ranks of {leavers[0][1].host} waits until no rank is adopted"
        return structs.replace(record, detail=waits)
    if not leavers:
        return structs.replace(record, detail="") if record.detail else None
    if not all(_calm(facts, m.worker) for m in record.membership.members):
        why = silent_member(record, facts, age)
        return structs.replace(record, detail=why) if why else None
    obstacles = []
    for host in _in_turn([m for _, m in leavers], by_worker):
        leaving = [(r, m) for r, m in leavers if m.host == host]
        verdict = by_worker[leaving[0][1].worker]
        joiners, waits = _joiners(record, view, facts, host, [r for r, _ in leaving])
        if waits := waits or _pauses(record, host, verdict.request, age):
            obstacles.append(waits)
            continue
        sources = _sources(record, view, facts, leaving)
        moves = tuple(
            Move(rank=r, leaver=m, joiner=joiners[r], source=sources[r]) for r, m in leaving
        )
        refused = refused_here(record, host)
        choice = reasons(joiners, view, record, facts, left_out=sorted(refused))
        return _open_planned(record, facts, moves, verdict, choice, now)
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
    choice = reasons(joiners, view, record, facts)
    return _open_planned(record, facts, moves, verdict, choice, now)


def is_left(record: JobRecord, host: str) -> bool:
    """Whether a live plan moves all ranks off ``host``."""
    plan = record.plan
    if plan is None or not is_live(plan) or plan.phase is Phase.DISARM:
        return False
    return host not in {member.host for member in plan.new.members}


def obstacle(record: JobRecord, view: ClusterView, host: str) -> str:
    """Why the ranks on ``host`` cannot move now, for lack of standbys. Empty if they can, or while
    a plan is live."""
    if is_live(record.plan) or record.state is not JobState.RUNNING:
        return ""
    ranks = [r for r, m in enumerate(record.membership.members) if m.host == host]
    return _joiners(record, view, PlanFacts(view, record.job), host, ranks)[1]


def silent_member(record: JobRecord, facts: PlanFacts, age: float = inf) -> str:
    """Why no rank moves while training may well go on: the daemon of a member is silent, and a
    switch needs all members. Empty if none has been silent for ``SILENT_S``, or while a plan is
    live.

    ``age``: seconds for which a member without a report has been silent, unless ``facts`` know.
    """
    if is_live(record.plan) or record.state is not JobState.RUNNING:
        return ""
    for member in record.membership.members:
        worker = member.worker
        if worker in facts.status or facts.has_ended(worker):
            continue
        if facts.silence(worker, age) >= SILENT_S:
            return f"moves wait: nothing is heard of {worker}; is the daemon of {member.host} up?"
    return ""


def _joiners(
    record: JobRecord, view: ClusterView, facts: PlanFacts, host: str, ranks: Sequence[int]
) -> tuple[dict[int, Member], str]:
    """A standby for each of ``ranks``, which are on ``host``, or the reason to wait."""
    refused = refused_here(record, host)
    fit = undrained(view, lasting(view, candidates(view, record, facts)))
    spare = [c for c in fit if c.worker not in refused]
    found = assigned(ranks, spare, facts, idle_first=True)
    short = [r for r in ranks if r not in found]
    if not short:
        return found, ""
    why = shortfall(short, view, record, facts, left_out=sorted(refused), lasts=True)
    return found, f"moving the ranks of {host} waits for {len(short)} standby: {why}"


def _pauses(record: JobRecord, host: str, request: str, age: float) -> str:
    """Why the next move off ``host`` for ``request`` is not tried yet; empty if it may be.

    After one whose joiner failed or was not heard the next one has another joiner. A move that was
    dropped for anything else, such as a member that cannot switch, would be dropped again, and each
    costs the job a copy of the state.
    """
    dropped = [
        plan
        for plan in record.history
        if plan.kind is PlanKind.PLANNED
        and plan.phase is Phase.ABORTED
        and plan.old.epoch == record.membership.epoch
        and plan.request == request
        and not (plan.rejected or plan.late)
        and any(move.leaver.host == host for move in plan.moves)
    ]
    if not dropped:
        return ""
    pause = min(PAUSE_S * 2 ** (len(dropped) - 1), LONGEST_PAUSE_S)
    if age >= pause:
        return ""
    last = dropped[-1]
    return (
        f"moving the ranks of {host} is tried again {pause:g} s after {last.id}, which was "
        f"dropped: {last.outcome}"
    )


def _open_planned(
    record: JobRecord,
    facts: PlanFacts,
    moves: tuple[Move, ...],
    verdict: Verdict,
    choice: tuple[str, ...],
    now: float,
) -> JobRecord:
    epoch = record.proposed + 1
    changes = {m.rank: m.joiner for m in moves if m.joiner}
    new = record.membership.replaced(changes, epoch)
    plan = MigrationPlan(
        id=f"{record.job}-{epoch}",
        kind=PlanKind.PLANNED,
        phase=Phase.PREPARE,
        moves=moves,
        old=record.membership,
        new=new,
        cause=verdict.cause,
        reason=verdict.reason,
        policy=verdict.policy,
        leave=verdict.leave,
        request=verdict.request,
        choice=choice,
        builds_at_switch=_beside_obstacle(new.members, facts),
        timeline=(Mark(Phase.PREPARE, now),),
    )
    return structs.replace(record, plan=plan, proposed=epoch, detail="")


def _beside_obstacle(members: Iterable[Member], facts: PlanFacts) -> str:
    """Why inner groups of ``members`` cannot be built beside training; empty if they can."""
    for member in members:
        status = facts.status.get(member.worker)
        if status is not None and status.beside_obstacle:
            return f"{member.worker} reported: {status.beside_obstacle}"
    return ""


def _calm(facts: PlanFacts, worker: str) -> bool:
    status = facts.status.get(worker)
    return status is not None and status.activity is Activity.TRAINING and status.step > 0


def _progresses(record: JobRecord, facts: PlanFacts) -> bool:
    """Whether all ranks have just committed a step."""
    return all(
        _calm(facts, worker) and facts.status[worker].stands_s < JUST_S
        for worker in record.membership.workers
    )


def _sources(
    record: JobRecord, view: ClusterView, facts: PlanFacts, leaving: Sequence[tuple[int, Member]]
) -> dict[int, Member]:
    """The source of each joiner's state, by rank: the leaver, or a replica if its host is unsound.

    A source copies and stages for each of its joiners, so that each has as few as possible."""
    found: dict[int, Member] = {}
    for rank, leaver in leaving:
        alike = _replicas(record, view, facts, leaver) if _ails(view, leaver.host) else []
        joiners = Counter(m.worker for m in found.values())
        found[rank] = min(alike, key=lambda m: joiners[m.worker], default=leaver)
    return found


def _replicas(
    record: JobRecord, view: ClusterView, facts: PlanFacts, leaver: Member
) -> list[Member]:
    """Members on sound hosts that have the state of ``leaver``. Rank 0 is the last one, since
    scripts print and save there."""
    ranks = facts.status[leaver.worker].replicas
    alike = [m for r, m in enumerate(record.membership.members) if r in ranks]
    return [m for m in reversed(alike) if not _ails(view, m.host)]


def _ails(view: ClusterView, name: str) -> bool:
    host = view.host(name)
    return host is not None and any(a.severity in GRAVE for a in host.alerts)
