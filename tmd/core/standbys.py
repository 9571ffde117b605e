"""Which standby takes a rank. Pure choice; the reason for it is the order of the list."""

from __future__ import annotations

from collections.abc import Sequence

from tmd.core.findings import BANNED, GRAVE
from tmd.core.migration import Facts
from tmd.core.model import (
    Activity,
    ClusterView,
    JobRecord,
    Member,
    Phase,
    Strategy,
    WorkerStatus,
)

IDLE = 2
"""Distance of a standby that follows no rank."""
POOL = frozenset({Activity.STANDBY, Activity.SHADOWING, Activity.IN_STEP})


def candidates(view: ClusterView, record: JobRecord, facts: Facts) -> list[Member]:
    """Standbys that may take a rank, best first: ``on_hand`` without those that failed a rehearsal.

    First who follows a rank, for it has the state; hosts that hold no rank before others, so that a
    later loss of one host costs one rank.
    """
    return [m for m in on_hand(view, record, facts) if not is_unfit(facts.status[m.worker])]


def on_hand(view: ClusterView, record: JobRecord, facts: Facts) -> list[Member]:
    """Standbys of the job, in the order of ``candidates``, fit or not.

    Never one on a host that is to be left, is being drained or is banned, one that a detector that
    may act found unfit or degraded (it would be drained at once), or one of another world size.
    """
    holding = {m.host for m in record.membership.members}
    drained = {
        d.host for d in view.drains if d.leave or (d.host in holding and not record.served(d))
    }
    sick = {
        h.host
        for h in view.hosts
        for a in h.alerts
        if a.code == BANNED or (a.severity in GRAVE and a.strategy is Strategy.ACT and not a.job)
    }
    found = [
        (_distance(w, None), host.host in holding, host.host, w.worker, w.address)
        for host in view.hosts
        for w in host.workers
        if w.job == record.job
        and _in_pool(w)
        and w.world_size == record.world_size
        and host.host not in drained | sick
        and not facts.failing(w.worker)
    ]
    return [Member(worker=w, host=h, address=a) for *_, h, w, a in sorted(found)]


def _in_pool(status: WorkerStatus) -> bool:
    # A joiner of a plan is not, whatever it does at the moment.
    return status.activity in POOL and not status.plan


def is_unfit(status: WorkerStatus) -> bool:
    """Whether the worker has failed its rehearsal."""
    return status.rehearsed is not None and bool(status.rehearsed.refusal)


def _distance(status: WorkerStatus, rank: int | None) -> int:
    """0: has the state of ``rank``; 1: of a replica; 2: has none; 3: is busy getting one."""
    shadow = status.shadow
    if shadow is None:
        return IDLE
    if shadow.verified is None:
        return 3
    return 0 if rank is None or shadow.rank == rank else 1


def assigned(
    ranks: Sequence[int], spare: Sequence[Member], facts: Facts, *, idle_first: bool = False
) -> dict[int, Member]:
    """A standby for each rank, as far as they go: the nearest to it, else the first in line.

    ``idle_first``: there is time, so those that follow a rank are left to do so.
    """
    left, found = list(spare), {}

    def order(rank: int, member: Member) -> int:
        distance = _distance(facts.status[member.worker], rank)
        return abs(distance - IDLE) if idle_first else distance

    for rank in ranks[: len(left)]:
        nearest = min(left, key=lambda m: order(rank, m))
        left.remove(nearest)
        found[rank] = nearest
    return found


def refused_here(record: JobRecord, host: str) -> set[str]:
    """Joiners that failed in planned moves off ``host`` under the present membership."""
    return {
        worker
        for plan in record.history
        if plan.phase is Phase.ABORTED
        and plan.old == record.membership
        and any(move.leaver.host == host for move in plan.moves)
        for worker in plan.rejected
    }
