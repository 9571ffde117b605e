"""Decides which survivors compute for ranks that nobody else could take, and how a job grows back.

By default a job holds until a standby comes. One whose script allows it
(``session.register(elastic=True)``) goes on: each such rank is *adopted* by a survivor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from tmd.core.planning.migration import PlanFacts, is_live
from tmd.core.planning.readiness import SHRUNK
from tmd.core.planning.standbys import assigned, candidates, lasting
from tmd.core.values.model import (
    Activity,
    ClusterView,
    JobRecord,
    JobState,
    Member,
    Membership,
    Move,
    Phase,
    WorkerStatus,
)

ATTEMPTS = 3
"""Moves to a standby that may be dropped before it is not asked any more."""


def adopted(vacant: Iterable[int], owners: Collection[int]) -> dict[int, int]:
    """By rank of ``vacant``, the rank of ``owners`` whose holder adopts it: as even as can be.

    Of those with the fewest ranks the next one above takes it, on the circle, so that ranks whose
    neighbours hold them are summed near to their places.
    """
    loads = dict.fromkeys(sorted(owners), 1)
    found = {}
    for rank in sorted(vacant):
        least = min(loads.values())
        free = [own for own, load in loads.items() if load == least]
        own = next((own for own in free if own > rank), free[0])
        loads[own] += 1
        found[rank] = own
    return found


def refusal(view: ClusterView, statuses: Sequence[WorkerStatus]) -> str | None:
    """Why no rank is adopted by the workers of ``statuses``; empty if some can be, ``None`` if the
    script has not asked for that."""
    if not statuses or any(status.elastic is None for status in statuses):
        return None
    if older := (*view.earlier, *view.unread):
        return f"{', '.join(older)} cannot read of adopted ranks: update tmd there"
    return next((status.elastic for status in statuses if status.elastic), "")


def may_return(record: JobRecord, facts: PlanFacts) -> bool:
    """Whether ranks are about to be adopted although a joiner of a plan that was dropped is about
    to stand by again."""
    plan = record.plan
    if plan is None or plan.phase is not Phase.SYNC or not plan.new.adopted:
        return False
    return any(
        worker.rank is None and worker.plan and not facts.failing(worker.worker)
        for worker in facts.status.values()
        if worker.worker not in plan.rejected
    )


def growth(
    record: JobRecord, view: ClusterView, facts: PlanFacts
) -> tuple[tuple[Move, ...], dict[int, Member]]:
    """Moves of adopted ranks to the standbys that there are, and these by rank; none if there is
    none, while the job is disturbed, or while policies may move no rank."""
    membership = record.membership
    nothing: tuple[tuple[Move, ...], dict[int, Member]] = ((), {})
    if not membership.adopted or is_live(record.plan) or record.state is not JobState.RUNNING:
        return nothing
    if view.paused or view.breaker.open:
        return nothing
    if not all(_trains(facts, m) for m in membership.members):
        return nothing
    tried = _in_vain(record)
    fit = lasting(view, candidates(view, record, facts))
    spare = [m for m in fit if tried[m.worker] < ATTEMPTS]
    found = sorted(assigned(sorted(membership.adopted), spare, facts).items())
    # A joiner shadows a source of its own.
    joiners = dict(found[: len(load_of(membership))])
    pairs = zip(joiners.items(), _sources(membership), strict=False)
    moves = tuple(
        Move(rank=rank, leaver=membership.members[rank], joiner=joiner, source=source)
        for (rank, joiner), source in pairs
    )
    return moves, joiners


def _in_vain(record: JobRecord) -> Counter[str]:
    """By joiner, the number of moves of adopted ranks that were dropped with it.

    Those with no joiner to blame count for all of theirs, and a failover in between resets nothing:
    the next move would end as the last one did.
    """
    dropped = [p for p in record.history if p.phase is Phase.ABORTED and p.cause == SHRUNK]
    return Counter(
        worker
        for plan in dropped
        for worker in plan.rejected or [m.joiner.worker for m in plan.moves if m.joiner]
    )


def _trains(facts: PlanFacts, member: Member) -> bool:
    status = facts.status.get(member.worker)
    return status is not None and status.activity is Activity.TRAINING and status.step > 0


def _sources(membership: Membership) -> list[Member]:
    """Workers that joiners may shadow: first those with the fewest ranks, and of these the last
    ones, since scripts print and save on rank 0."""
    loads = load_of(membership)
    order = sorted(loads, key=lambda own: (loads[own], -own))
    return [membership.members[own] for own in order]


def load_of(membership: Membership) -> Mapping[int, int]:
    """By own rank of each worker, the number of ranks that it holds."""
    crew = membership.crew(range(membership.size))
    held = list(membership.adopted.values())
    return {own: 1 + held.count(own) for own in crew}


def shrunk(record: JobRecord) -> str:
    """That the job runs with fewer workers than ranks, in a sentence; empty if it does not."""
    adopted = record.membership.adopted
    if not adopted or record.state is not JobState.RUNNING:
        return ""
    pairs = ", ".join(f"rank {rank} by that of rank {own}" for rank, own in adopted.items())
    workers = record.world_size - len(adopted)
    return f"{workers} workers compute for {record.world_size} ranks: {pairs}"
