"""Decides which standbys shadow a rank without a planned move.

A *hot* standby stays: when its rank, or a replica of it, is lost, no state has to be copied. A
standby that *rehearses* leaves once it has computed the same bits. The rehearsal admits it to the
pool and initialises everything lazy in it. It rehearses each *role* of the job's ranks once, one
after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import inf

from tmd.core.planning.migration import PlanFacts, is_live
from tmd.core.planning.standbys import (
    POOL,
    assigned,
    barred,
    candidates,
    in_reserve,
    on_hand,
    takes,
)
from tmd.core.values.limits import ShadowGoals
from tmd.core.values.model import (
    Activity,
    ClusterView,
    JobRecord,
    JobState,
    Member,
    ShadowAssignment,
    WorkerStatus,
)
from tmd.core.values.shadows import verdict_on, why_unfit


def assign_shadows(
    record: JobRecord,
    view: ClusterView,
    facts: PlanFacts,
    wanted: ShadowGoals,
    silent_s: float = 0.0,
) -> tuple[ShadowAssignment, ...]:
    """Which standby shadows which rank; it changes only while the job trains undisturbed.

    A standby that misses heartbeats keeps its assignment for ``silent_s``.
    """
    if record.state is not JobState.RUNNING or is_live(record.plan):
        return record.shadows
    if record.membership.adopted:
        return ()  # what a standby can do for the job is to take an adopted rank
    asked = {r.host: r.id for r in view.rehearsals}
    barring, reserve = barred(view), in_reserve(view)
    employed = {u.member for u in record.shadows}
    spare = [
        c for c in candidates(view, record, facts) if c not in employed and c.host not in reserve
    ]

    trains = all(_trains(facts, m.worker) for m in record.membership.members)
    # One at a time, so that no more end than are replaced.
    replaced = next(
        (u for u in record.shadows if trains and _gives_way(u, reserve, spare, facts)), None
    )
    # A standby on a drained host could not assume the rank: another one takes its place.
    left = [u for u in record.shadows if u is not replaced and u.member.host not in barring]
    kept = tuple(u for u in left if _goes_on(u, record, facts, wanted, silent_s))
    if not trains:
        return kept
    busy = [u.member for u in kept]
    hot = [u for u in kept if u.stay]
    if len(hot) < min(wanted.hot, record.world_size):
        another = _another(record, facts, spare, {u.rank for u in hot})
        if another is not None:
            return (*kept, another)
    if len(hot) < len(kept):
        return kept  # one rehearsal at a time, since each takes some of the rank's network
    roles = roles_of(record, facts)
    for member in on_hand(view, record, facts):
        if member in busy:
            continue
        request, status = asked.get(member.host, ""), facts.status[member.worker]
        rank = to_rehearse(status, roles, request, wanted)
        if rank is not None:
            return (*kept, ShadowAssignment(member=member, rank=rank, stay=False, request=request))
    return kept


def roles_of(record: JobRecord, facts: PlanFacts) -> dict[str, list[int]]:
    """Roles of the job and their ranks, the last one first, by the frequency of the roles. Ranks of
    unknown role form one role."""
    found: dict[str, list[int]] = {}
    for rank in reversed(range(record.world_size)):
        found.setdefault(facts.role(rank), []).append(rank)
    return dict(sorted(found.items(), key=lambda role: -len(role[1])))


def answered(status: WorkerStatus, roles: dict[str, list[int]], request: str) -> bool:
    """Whether a standby has rehearsed each of ``roles`` for ``request``."""
    return all(_has_answered(status, ranks[0], role, request) for role, ranks in roles.items())


def to_rehearse(
    status: WorkerStatus, roles: dict[str, list[int]], request: str, wanted: ShadowGoals
) -> int | None:
    """The next rank that a standby must rehearse, of a role that it has not rehearsed yet or that
    ``request`` asks for; ``None`` if there is none.

    The role that it is built for comes first, then the most frequent one. Of a role it rehearses a
    rank other than the one that its script got first, if there is one: a script that goes on with
    that rank computes the right bits for it, and for no other. Rank 0 comes after the others, since
    scripts print and save there. A suspect standby is tried again only for a request, or if it
    refused a planned move. Then it rehearses a different rank first, since the fault may lie with
    the source of that move.
    """
    suspect = any(v.suspect and v.refused_rank is None for v in status.rehearsed)
    refused = {v.refused_rank for v in status.rehearsed}
    # One that builds its role anew has got the last rank of it meanwhile.
    got = {status.first_rank, *(ranks[0] for ranks in roles.values() if status.serves)}

    def is_due(role: str, rank: int) -> bool:
        if request and not _has_answered(status, rank, role, request):
            return True
        verdict = verdict_on(status.rehearsed, rank, role)
        unknown = verdict is None or verdict.refused_rank is not None
        return wanted.rehearse and unknown and not suspect

    due = [
        sorted(ranks, key=lambda n: (n in refused, n in got))
        for role, ranks in roles.items()
        if is_due(role, ranks[0])
    ]
    built = (rank for ranks in due for rank in ranks if rank in status.serves)
    return next(chain(built, (ranks[0] for ranks in due)), None)


def _has_answered(status: WorkerStatus, rank: int, role: str, request: str) -> bool:
    """Whether it has rehearsed ``role``, and for ``request`` if there is one."""
    verdict = verdict_on(status.rehearsed, rank, role)
    if verdict is None or verdict.refused_rank is not None:
        return False
    return not request or verdict.request == request


def _another(
    record: JobRecord, facts: PlanFacts, spare: Sequence[Member], covered: set[int]
) -> ShadowAssignment | None:
    """Another hot standby, if one is fit for a rank that is not ``covered``.

    As in a rehearsal, it follows a rank other than the one that its script got first, if that has
    another replica.
    """
    # Rank 0 last, since scripts print and save there.
    order = [rank for rank in reversed(range(record.world_size)) if rank not in covered]
    hot = next(_fit_for(order, spare, facts), None)
    if hot is None or hot.rank != facts.status[hot.member.worker].first_rank:
        return hot
    holder = facts.status.get(record.membership.members[hot.rank].worker)
    alike = set() if holder is None else {*holder.replicas}
    role = facts.role(hot.rank)
    others = [r for r in order if r in alike and 0 != r != hot.rank and facts.role(r) == role]
    return next(_fit_for(others, [hot.member], facts), hot)


def _fit_for(
    ranks: Sequence[int], spare: Sequence[Member], facts: PlanFacts
) -> Iterator[ShadowAssignment]:
    for rank in ranks:
        if found := assigned([rank], spare, facts):
            yield ShadowAssignment(member=found[rank], rank=rank, stay=True)


def _gives_way(
    assignment: ShadowAssignment, reserve: set[str], spare: Sequence[Member], facts: PlanFacts
) -> bool:
    """Whether another standby is the better hot one, since this one gets a rank last."""
    held_back = assignment.stay and assignment.member.host in reserve
    return held_back and takes(spare, assignment.rank, facts)


def _goes_on(
    assignment: ShadowAssignment,
    record: JobRecord,
    facts: PlanFacts,
    wanted: ShadowGoals,
    silent_s: float,
) -> bool:
    worker, rank = assignment.member.worker, assignment.rank
    if facts.failing(worker) or record.membership.rank_of(worker) is not None:
        return False
    status = facts.status.get(worker)
    if status is None:  # a new standby would have to copy the state again
        return wanted.hot > 0 and assignment.stay and facts.silence(worker, inf) < silent_s
    if status.activity not in POOL:
        return False
    role = facts.role(rank)
    if assignment.stay:
        return wanted.hot > 0 and not why_unfit(status.rehearsed, rank, role)
    return not _has_answered(status, rank, role, assignment.request)


def _trains(facts: PlanFacts, worker: str) -> bool:
    status = facts.status.get(worker)
    return status is not None and status.activity is Activity.TRAINING and status.step > 1
