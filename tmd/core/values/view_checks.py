"""Common questions about a view of the cluster."""

from __future__ import annotations

from tmd.core.values.model import ClusterView, JobRecord, JobState

ENDED = frozenset({JobState.FINISHED, JobState.FAILED})


def holdings(view: ClusterView) -> dict[str, list[JobRecord]]:
    """Hosts that hold ranks -> jobs of these ranks, unless those have ended."""
    found: dict[str, list[JobRecord]] = {}
    for record in view.jobs:
        if record.state not in ENDED:
            for member in record.membership.members:
                found.setdefault(member.host, []).append(record)
    return found


def unknown_host(view: ClusterView, host: str) -> str:
    """Why a request cannot name ``host``; empty if it can."""
    known = {h.host for h in view.hosts} | set(holdings(view))
    if host in known:
        return ""
    names = ", ".join(sorted(known)) or "none"
    return f"there is no host '{host}' in this cluster; heard from: {names}"


def drain_roles(view: ClusterView) -> dict[str, str]:
    """Hosts with an effective drain, and their role."""
    roles: dict[str, str] = {}
    for request in view.drains:
        waiting = any(
            m.host == request.host and not record.served(request)
            for record in view.jobs
            for m in record.membership.members
        )
        if request.leave:
            roles[request.host] = "leaving"
        elif waiting or request.bars:
            roles[request.host] = "draining" if waiting else "drained"
        elif request.reserve:
            roles[request.host] = "in reserve"
    return roles


def left_alone(record: JobRecord, view: ClusterView) -> str:
    """Why nothing is decided about the job, in a sentence; empty if it can be."""
    parties = {m.host for m in record.parties}
    if hosts := sorted(parties & set(view.unread)):
        return f"{', '.join(hosts)} cannot be understood: update tmd here, or there"
    # They would carry out nothing that is decided.
    heard = (view.host(name) for name in sorted(parties))
    if hosts := [h.host for h in heard if h is not None and h.reads < record.v]:
        return f"{', '.join(hosts)} cannot read the record of the job: update tmd there"
    return ""


def too_new(job: str) -> str:
    """Says that the record of ``job`` is left alone."""
    return f"a later version of tmd wrote the record of job {job}: update tmd on this host"
