"""Whether a host holds no rank and gets none, so that it can be taken away."""

from __future__ import annotations

from tmd.core.values.model import FINAL, ClusterView
from tmd.core.values.view_checks import ENDED, jobs_by_host

SETTLED_S = 2.0
"""How long a drain must stand before its host counts as free: longer than a leader takes from its
look at the cluster to its plan."""
GONE_S = 60.0
"""How long a silent host must seem free before it counts as free: longer than daemons take to put
the records of jobs back into a Redis that has lost them."""


def is_free(view: ClusterView, host: str) -> bool:
    """Whether ``host`` holds no rank and no plan gives it one, as far as can be read."""
    return not (
        unreadable(view, host)
        or host in jobs_by_host(view)
        or _reports_rank(view, host)
        or _awaits_rank(view, host)
    )


def unreadable(view: ClusterView, host: str) -> tuple[str, ...]:
    """What cannot be read and may give a rank to ``host``: its own heartbeat, and the records of
    jobs with workers there; of all such jobs while the host does not say which it has."""
    status = view.host(host)
    if status is None:
        return (*(name for name in view.unread if name == host), *view.unread_jobs)
    there = {worker.job for worker in status.workers}
    return tuple(job for job in view.unread_jobs if job in there)


def _reports_rank(view: ClusterView, host: str) -> bool:
    """Whether a worker there says that it holds a rank: Redis may have lost the record of its job,
    which daemons put back a little later than the heartbeats."""
    ended = {record.job for record in view.jobs if record.state in ENDED}
    status = view.host(host)
    workers = () if status is None else status.workers
    return any(w.rank is not None and w.job not in ended for w in workers)


def _awaits_rank(view: ClusterView, host: str) -> bool:
    """Whether a live plan gives a rank to ``host``, or may find the state of one there: a leaver
    takes its rank back if its joiner is lost before it has committed."""
    return any(
        host in {m.host for m in (*record.parties, *(move.leaver for move in record.plan.moves))}
        for record in view.jobs
        if record.state not in ENDED and record.plan is not None and record.plan.phase not in FINAL
    )
