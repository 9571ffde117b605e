"""Standbys that live the life of a rank though no move is planned.

A *hot* one stays: when its rank, or a replica of it, is lost there is no state to copy. One that
only *rehearses* leaves again as soon as it has computed the same bits: that is how a standby is
admitted to the pool, and how everything lazy in it gets warm.
"""

from __future__ import annotations

from tmd.core.limits import Understudies
from tmd.core.migration import Facts, is_live
from tmd.core.model import Activity, ClusterView, JobRecord, JobState, Understudy, WorkerStatus
from tmd.core.standbys import POOL, candidates, is_unfit, on_hand


def understudied(
    record: JobRecord, view: ClusterView, facts: Facts, wanted: Understudies
) -> tuple[Understudy, ...]:
    """Who is to follow which rank now; changes only while the job trains undisturbed."""
    if record.state is not JobState.RUNNING or is_live(record.plan):
        return record.understudies
    asked = {r.host: r.id for r in view.rehearsals}
    kept = tuple(u for u in record.understudies if _goes_on(u, record, facts, wanted))
    if not all(_trains(facts, m.worker) for m in record.membership.members):
        return kept
    busy = [u.member for u in kept]
    spare = [c for c in candidates(view, record, facts) if c not in busy]
    hot = [u for u in kept if u.stay]
    if len(hot) < min(wanted.hot, record.world_size) and spare:
        covered = {u.rank for u in hot}
        # Rank 0 last: it is there that scripts print and save.
        rank = next(r for r in reversed(range(record.world_size)) if r not in covered)
        return (*kept, Understudy(member=spare[0], rank=rank, stay=True))
    if len(hot) < len(kept):
        return kept  # one rehearsal at a time: each takes some of the rank's network
    for member in on_hand(view, record, facts):
        request = asked.get(member.host, "")
        if member not in busy and _is_due(facts.status[member.worker], request, wanted):
            last = record.world_size - 1
            return (*kept, Understudy(member=member, rank=last, stay=False, request=request))
    return kept


def _is_due(status: WorkerStatus, request: str, wanted: Understudies) -> bool:
    """Whether a standby has to rehearse: for the first time, or because somebody asks for it."""
    verdict = status.rehearsed
    if request and (verdict is None or verdict.request != request):
        return True
    return wanted.rehearse and verdict is None


def _goes_on(understudy: Understudy, record: JobRecord, facts: Facts, wanted: Understudies) -> bool:
    worker = understudy.member.worker
    status = facts.status.get(worker)
    if status is None or facts.failing(worker) or status.activity not in POOL:
        return False
    if record.membership.rank_of(worker) is not None:
        return False
    if understudy.stay:
        return wanted.hot > 0 and not is_unfit(status)
    verdict = status.rehearsed
    return verdict is None or verdict.request != understudy.request


def _trains(facts: Facts, worker: str) -> bool:
    status = facts.status.get(worker)
    return status is not None and status.activity is Activity.TRAINING and status.step > 1
