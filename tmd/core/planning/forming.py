"""Forms a job: which of the workers that have come get its ranks."""

from __future__ import annotations

from collections import Counter

from tmd.core.planning.peers import commonest, mismatch
from tmd.core.planning.standbys import barred, in_reserve
from tmd.core.values.model import (
    Activity,
    ClusterView,
    HostStatus,
    JobRecord,
    JobState,
    Member,
    Membership,
    WorkerStatus,
)

HostedWorkers = list[tuple[str, WorkerStatus]]
"""Workers, each with the name of its host."""


def form(view: ClusterView, job: str, before: JobRecord | None = None) -> JobRecord | None:
    """The first record of ``job`` once it has as many workers as ranks.

    Workers on hosts marked ``standby`` or drained get no rank here, those on hosts in reserve only
    if there are no others. ``before`` is the record of an ended run with the same name, whose
    epochs and revisions continue.
    """
    fresh = _of_one_size(_eligible(view, job))
    size = len(fresh) and fresh[0][1].world_size
    common = commonest(w for _, w in fresh)
    fit = [(h, w) for h, w in fresh if mismatch(w, common) is None]
    reserve = in_reserve(view)
    order = sorted((h in reserve, h, w.worker, w.address) for h, w in fit)
    if not size or len(order) < size:
        return None
    chosen = sorted(order[:size], key=lambda one: one[1:])
    members = tuple(Member(worker=w, host=h, address=a) for _, h, w, a in chosen)
    epoch = 1 if before is None else before.proposed + 1
    return JobRecord(
        job=job,
        world_size=size,
        state=JobState.RUNNING,
        membership=Membership(epoch=epoch, members=members),
        proposed=epoch,
        revision=1 if before is None else before.revision + 1,
        history=() if before is None else before.history,
    )


def why_not_formed(view: ClusterView, job: str) -> str:
    """Why the job is not formed, if an operator must act; else empty."""
    come = _eligible(view, job)
    if uneven := _uneven(come):
        return f"the job is not formed: {uneven}"
    fresh = _of_one_size(come)
    common = commonest(w for _, w in fresh)
    unlike = [(w, found) for _, w in fresh if (found := mismatch(w, common))]
    if unlike and len(fresh) - len(unlike) < fresh[0][1].world_size <= len(fresh):
        why = "; ".join(f"worker {w.worker}: {found.why}" for w, found in unlike)
        remedies = "; ".join(dict.fromkeys(found.remedy for _, found in unlike))
        return f"the job is not formed: {why}: {remedies}"
    held = sorted({host.host for host, _ in _starting(view, job)} & barred(view))
    if not held:
        return ""
    names = ", ".join(held)
    return f"the job is not formed: these hosts are drained: {names} ('tmd undrain HOST')"


def _of_one_size(found: HostedWorkers) -> HostedWorkers:
    """Workers of one world size: the only complete one, or the most common one if none is. Empty if
    several are complete: a launcher of an earlier run with the same name may still be there."""
    sizes = Counter(w.world_size for _, w in found)
    whole = [size for size, number in sizes.items() if number >= size]
    if len(whole) > 1:
        return []
    size = whole[0] if whole else max(sizes, key=lambda size: (sizes[size], size), default=0)
    return [(host, w) for host, w in found if w.world_size == size]


def _eligible(view: ClusterView, job: str) -> HostedWorkers:
    """Workers that wait for a rank of a new run, on hosts that may have one."""
    drained = barred(view)
    return [
        (host.host, worker)
        for host, worker in _starting(view, job)
        if not (host.standby or host.host in drained)
    ]


def _starting(view: ClusterView, job: str) -> list[tuple[HostStatus, WorkerStatus]]:
    """Workers that wait for a rank of a new run."""
    return [
        (host, worker)
        for host in view.hosts_of(job)
        for worker in host.workers
        if worker.job == job and worker.activity is Activity.STARTING and worker.address
    ]


def _uneven(found: HostedWorkers) -> str:
    """What is wrong if workers of one job were launched for worlds of different sizes."""
    hosts: dict[int, str] = {}
    for host, worker in found:
        hosts.setdefault(worker.world_size, host)
    if len(hosts) < 2:
        return ""
    sizes = "; ".join(f"{size} ranks (as on {hosts[size]})" for size in sorted(hosts))
    return (
        f"its workers were launched for worlds of {sizes}: stop the launchers of an earlier run, "
        "and give all others the same --nnodes and --nproc-per-node"
    )
