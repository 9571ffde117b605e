"""States why a standby got a rank, and why the others did not: sentences for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tmd.core.planning.migration import PlanFacts
from tmd.core.planning.standbys import (
    IDLE,
    CandidateRank,
    Standby,
    has_rehearsed,
    line,
    unfit_for,
)
from tmd.core.values.model import Activity, ClusterView, JobRecord, Member

SOFTLY_DRAINED = "its host is drained, and gets a rank only after a loss"
MOST_REASONS = 20
"""Reasons kept in a plan."""
MOST_NAMED = 5
"""A sentence names at most as many workers. All hosts of a job read it with the record."""
WHY_LATER = (
    "its host has a grave finding",
    "its host is drained and in reserve",
    "its host has a grave finding of a detector that only observes",
    "it is farther from the state",
    "its host holds a rank already",
    "it has not rehearsed",
    "a rank was taken off its host more recently",
    "its name comes later",
    "its name comes later",
)
"""For each criterion, why a standby comes after another one."""


def reasons(
    chosen: dict[int, Member],
    view: ClusterView,
    record: JobRecord,
    facts: PlanFacts,
    *,
    left_out: Sequence[str] = (),
) -> tuple[str, ...]:
    """Sentences for people: why each of ``chosen`` got its rank, and why the others did not."""
    standbys = {s.member.worker: s for s in line(view, record, facts)}
    taken = {m.worker: rank for rank, m in chosen.items()}
    better = [
        s
        for worker, s in standbys.items()
        if worker not in taken and not s.refusal and not _passing(s.standing)
    ]

    def is_last_resort(rank: int) -> bool:
        return all(_failure(s.member, [rank], facts, left_out) for s in better)

    found = [
        f"rank {rank}: {member.worker}: "
        + _merits(standbys[member.worker], rank, facts, is_last_resort(rank))
        for rank, member in sorted(chosen.items())
        if member.worker in standbys
    ]
    last = max((standbys[w].standing for w in taken if w in standbys), default=None)
    for worker, standby in standbys.items():
        if worker not in taken:
            failed = _failure(standby.member, sorted(chosen), facts, left_out)
            unready = "" if failed else _unrehearsed(worker, taken, facts)
            why = standby.refusal or failed or unready or _later(standby, last)
            found.append(f"not {worker}: {why}")
    return tuple(found[:MOST_REASONS])


def shortfall(
    ranks: Sequence[int],
    view: ClusterView,
    record: JobRecord,
    facts: PlanFacts,
    *,
    left_out: Sequence[str] = (),
    lasts: bool = False,
) -> str:
    """Why no standby takes ``ranks``: the obstacle for each existing one.

    ``lasts``: standbys count only on hosts where a rank may stay.
    """

    drained = {d.host for d in view.drains}

    def in_the_way(standby: Standby) -> str:
        failed = standby.refusal or _failure(standby.member, ranks, facts, left_out)
        if failed or not lasts:
            return failed
        why = _passing(standby.standing)
        return why or (SOFTLY_DRAINED if standby.member.host in drained else "")

    found = [
        f"not {s.member.worker}: {why}" for s in line(view, record, facts) if (why := in_the_way(s))
    ]
    starting = sum(w.activity is Activity.STARTING for w in view.workers(record.job).values())
    if starting:
        found.append(f"{starting} still starting")
    if len(found) > MOST_NAMED:
        found[MOST_NAMED:] = [f"and {len(found) - MOST_NAMED} more"]
    return "; ".join(found) or "the job has no other standby"


def the_first(workers: Sequence[str]) -> str:
    """Names the first of ``workers``, for a sentence. It does not count the others: the record
    would change whenever one of them halts."""
    more = " and others" if len(workers) > MOST_NAMED else ""
    return ", ".join(workers[:MOST_NAMED]) + more


def _passing(standing: CandidateRank) -> str:
    """Why a rank would have to leave this standby's host again; empty if it could stay."""
    if standing.ails:
        return "its host has a grave finding"
    return "its host is drained and in reserve" if standing.reserve else ""


def _merits(standby: Standby, rank: int, facts: PlanFacts, last_resort: bool) -> str:
    standing, status = standby.standing, facts.status[standby.member.worker]
    shadow = status.shadow
    words = ["it shadows no rank" if shadow is None else f"it shadows rank {shadow.rank}"]
    words.append("its host holds a rank already" if standing.crowded else "its host holds none")
    if has_rehearsed(status, rank, facts):
        words.append("rehearsed")
    else:
        words.append("not rehearsed" if standing.untried else "rehearsed as another rank only")
    if why := _passing(standing):
        words.append(f"{why}, but there is no other" if last_resort else why)
    return ", ".join(words)


def _failure(
    member: Member, ranks: Sequence[int], facts: PlanFacts, left_out: Sequence[str]
) -> str:
    """Why it must get none of ``ranks``; empty if it may get one."""
    unfit = [unfit_for(facts, member, rank) for rank in ranks]
    if unfit and all(unfit):
        return f"it failed its rehearsal: {unfit[0]}"
    return "it failed as joiner of this move before" if member.worker in left_out else ""


def _unrehearsed(worker: str, taken: dict[str, int], facts: PlanFacts) -> str:
    """Why it was passed over for lack of a rehearsal that the chosen ones had; else empty."""
    status = facts.status[worker]
    if not any(v.has_shown for v in status.rehearsed):
        return ""
    behind = [
        rank
        for other, rank in taken.items()
        if other in facts.status
        and has_rehearsed(facts.status[other], rank, facts)
        and not has_rehearsed(status, rank, facts)
    ]
    if not behind or len(behind) < len(taken):
        return ""
    return f"it has not rehearsed what rank {behind[0]} is built as"


def _later(standby: Standby, last: CandidateRank | None) -> str:
    """Why it comes after the last chosen one."""
    if last is None:
        return "no more standbys were needed"
    mine: tuple[Any, ...] = standby.standing
    for own, other, why in zip(mine, last, WHY_LATER, strict=True):
        if own != other:
            if own > other:
                return why
            break
    if standby.standing.distance < IDLE:
        return "it shadows a rank and is left to do so"
    return "another one was nearer to the state of the rank"
