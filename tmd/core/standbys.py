"""Which standby takes a rank. Pure choice; the reason for it is the order of the list."""

from __future__ import annotations

from tmd.core.migration import Facts
from tmd.core.model import Activity, ClusterView, JobRecord, Member, Phase, Severity, Strategy


def candidates(view: ClusterView, record: JobRecord, facts: Facts) -> list[Member]:
    """Standbys that may take a rank, best first.

    Never one on a host that is to be left or is being drained, one that a detector found unfit, or
    one of another world size.
    Hosts that hold no rank come first, so that a later loss of one host costs one rank.
    """
    holding = {m.host for m in record.membership.members}
    drained = {
        d.host for d in view.drains if d.leave or (d.host in holding and not record.served(d))
    }
    sick = {
        h.host
        for h in view.hosts
        for a in h.alerts
        if a.severity is Severity.FATAL and a.strategy is Strategy.ACT and not a.job
    }
    found = [
        (host.host in holding, host.host, w.worker, w.address)
        for host in view.hosts
        for w in host.workers
        if w.job == record.job
        and w.activity is Activity.STANDBY
        and w.world_size == record.world_size
        and host.host not in drained | sick
        and not facts.failing(w.worker)
    ]
    return [Member(worker=w, host=h, address=a) for _, h, w, a in sorted(found)]


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
