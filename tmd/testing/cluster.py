"""A cluster as policies see it."""

from __future__ import annotations

from msgspec import structs

from tmd.core.values.model import (
    Activity,
    Alert,
    ClusterView,
    HostStatus,
    JobRecord,
    JobState,
    Member,
    Membership,
    Severity,
    State,
    Strategy,
)
from tmd.testing.clients import worker_status

JOB, AT = "job", 1000.0
TRAINING, SPARE = ("h1", "h2"), "h3"


def failing_job() -> ClusterView:
    """A job of two ranks and a standby. The host of rank 0 has a fatal finding of a detector that
    may act, which has been there for long."""
    members = [Member(f"{host}/{JOB}/0.a", host, f"{host}:1") for host in TRAINING]
    record = JobRecord(
        job=JOB,
        world_size=len(members),
        state=JobState.RUNNING,
        membership=Membership(epoch=1, members=tuple(members)),
        proposed=1,
        revision=1,
    )
    hosts = [_host(member, rank) for rank, member in enumerate(members)]
    hosts[0] = structs.replace(hosts[0], alerts=(_fatal(TRAINING[0]),))
    standby = Member(f"{SPARE}/{JOB}/0.a", SPARE, f"{SPARE}:1")
    return ClusterView(hosts=(*hosts, _host(standby, None)), jobs=(record,))


def _host(member: Member, rank: int | None) -> HostStatus:
    status = structs.replace(
        worker_status(member.worker),
        activity=Activity.STANDBY if rank is None else Activity.TRAINING,
        world_size=len(TRAINING),
        rank=rank,
        epoch=1,
        step=100,
        step_seconds=1.0,
    )
    return HostStatus(member.host, "i", workers=(status,), at=AT)


def _fatal(host: str) -> Alert:
    return Alert(
        id=f"{host}-1",
        host=host,
        detector="kit",
        code="kit.fault",
        entity="gpu:0",
        severity=Severity.FATAL,
        state=State.RAISED,
        message="the test kit says so",
        job="",
        strategy=Strategy.ACT,
        count=1,
        at=AT / 2,
    )
