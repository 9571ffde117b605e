"""Common questions about a view of the cluster."""

from __future__ import annotations

from collections.abc import Iterable

from tmd.core.values.model import ClusterView, JobRecord, JobState

ENDED = frozenset({JobState.FINISHED, JobState.FAILED})


def unfinished(view: ClusterView) -> list[JobRecord]:
    """The jobs that have not ended."""
    return [record for record in view.jobs if record.state not in ENDED]


def jobs_by_host(view: ClusterView) -> dict[str, list[JobRecord]]:
    """The unfinished jobs that have ranks on each host, by host."""
    found: dict[str, list[JobRecord]] = {}
    for record in unfinished(view):
        for host in dict.fromkeys(member.host for member in record.membership.members):
            found.setdefault(host, []).append(record)
    return found


def known_hosts(view: ClusterView) -> set[str]:
    """Hosts with a heartbeat (even one of a later release), a rank or a drain request."""
    alive = {h.host for h in view.hosts} | {*view.unread}
    return alive | jobs_by_host(view).keys() | {d.host for d in view.drains}


def unknown_host(view: ClusterView, host: str) -> str:
    """Why a request cannot name ``host``; empty if it can."""
    known = known_hosts(view)
    if host in known:
        return ""
    names = ", ".join(sorted(known)) or "none"
    return f"there is no host '{host}' in this cluster; known hosts: {names}"


def drain_roles(view: ClusterView) -> dict[str, str]:
    """The role of each host under a drain request: leaving, draining, drained or in reserve."""
    roles: dict[str, str] = {}
    for request in view.drains:
        waiting = any(
            m.host == request.host and not record.served(request)
            for record in unfinished(view)
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
    """Why the leader must not decide anything about the job; empty if it may decide."""
    parties = {m.host for m in record.parties}
    if hosts := sorted(parties & set(view.unread)):
        return not_understood(hosts)
    # A host that cannot read the record would not carry out what the leader decides.
    statuses = (view.host(name) for name in sorted(parties))
    if hosts := [h.host for h in statuses if h is not None and h.reads < record.v]:
        return f"{', '.join(hosts)} cannot read the record of the job: update tmd there"
    return ""


def not_understood(hosts: Iterable[str]) -> str:
    """The message for ``hosts`` whose status a later version of tmd wrote."""
    return f"the status of {', '.join(hosts)} cannot be read: update tmd here, or there"


def too_new(job: str) -> str:
    """The message for a record of ``job`` that a later version of tmd wrote."""
    return f"a later version of tmd wrote the record of job {job}: update tmd on this host"
