"""Questions about a view of the campaign's cluster."""

from __future__ import annotations

from tmd.core.values.model import FINAL, Activity, ClusterView, MigrationPlan, WorkerStatus
from tmd.core.values.shadows import Rehearsal
from tmd.demo.cluster import workers


def rehearsed(view: ClusterView) -> bool:
    """Whether every standby has finished its rehearsals."""
    waiting = [w for w in workers(view) if w.activity is Activity.STANDBY]
    return all(w.rehearsed for w in waiting)


def verdict(view: ClusterView, host: str, request: str) -> Rehearsal | None:
    """The verdict of a standby of ``host`` that answers ``request``."""
    here = [w for w in workers(view) if w.worker.startswith(f"{host}/")]
    return next((found for w in here for found in w.rehearsed if found.request == request), None)


def followed(view: ClusterView) -> set[int]:
    """Ranks that a hot standby could take over."""
    assigned = view.jobs[0].shadows if view.jobs else ()
    in_step = {
        w.worker
        for w in workers(view)
        if w.activity is Activity.IN_STEP and w.shadow is not None and w.shadow.verified
    }
    return {a.rank for a in assigned if a.stay and a.member.worker in in_step}


def live_plan(view: ClusterView) -> MigrationPlan | None:
    """The live plan of the job."""
    plan = view.jobs[0].plan if view.jobs else None
    return plan if plan is not None and plan.phase not in FINAL else None


def meant(view: ClusterView, where: str) -> WorkerStatus | None:
    """The worker that ``where`` denotes in ``view``."""
    word, _, named = where.partition(" ")
    if not view.jobs:
        return None
    plan = view.jobs[0].plan
    moves = plan.moves if plan is not None else ()
    wanted: set[str] = set()
    if word == "rank":
        wanted = {view.jobs[0].membership.members[int(named)].worker}
    elif word == "joiner":
        wanted = {m.joiner.worker for m in moves if m.joiner}
    elif word == "leaver":
        wanted = {m.leaver.worker for m in moves}
    for status in workers(view):
        on_host = word == "host" and status.worker.startswith(f"{named}/")
        spare = word == "standby" and status.rank is None
        if status.worker in wanted or on_host or spare:
            return status
    return None
