"""Views of a cluster that trains one job on one host per rank."""

from __future__ import annotations

from msgspec import structs

from tmd.plugin import (
    Activity,
    Alert,
    ClusterView,
    HostStatus,
    JobRecord,
    JobState,
    Kind,
    Member,
    Membership,
    MigrationPlan,
    Pace,
    Phase,
    Severity,
    State,
    Strategy,
)
from tmd.testing.clients import worker_status

HOSTS = ("h1", "h2", "h3")


def worker(host):
    return f"{host}/job/0.a"


def member(host):
    return Member(worker(host), host, f"{host}:1")


RECORD = JobRecord(
    job="job",
    world_size=3,
    state=JobState.RUNNING,
    membership=Membership(epoch=1, members=tuple(map(member, HOSTS))),
    proposed=1,
    revision=1,
)


def finding(host="h2", **changes):
    """Of a GPU, by a detector that may act."""
    plain = Alert(
        id=f"{host}-1",
        host=host,
        detector="nvml",
        code="nvml.ecc",
        entity="gpu:GPU-1",
        severity=Severity.DEGRADED,
        state=State.RAISED,
        message="a row is to be remapped",
        job="",
        strategy=Strategy.ACT,
        count=1,
        at=100.0,
    )
    return structs.replace(plain, **changes)


def slow(host="h2", **changes):
    plain = finding(
        host, detector="straggler", code="straggler.slow", entity=worker(host), job="job"
    )
    return structs.replace(plain, **changes)


def host(name, *alerts, pace=None, activity=Activity.TRAINING, at=100.0):
    status = structs.replace(worker_status(worker(name)), activity=activity, pace=pace)
    return HostStatus(name, "i", workers=(status,), alerts=alerts, at=at)


def cluster(*hosts, record=RECORD, **changes):
    """All hosts that hold ranks are well unless ``hosts`` says otherwise."""
    given = {h.host: h for h in hosts}
    names = [*HOSTS, *(n for n in given if n not in HOSTS)]
    return ClusterView(
        hosts=tuple(given.get(n) or host(n) for n in names), jobs=(record,), **changes
    )


def pace(lost_s):
    return Pace(step=500, busy_s=1.3, ratio=1.3, slow_since=400, lost_s=lost_s)


def planned(number, **changes):
    plain = MigrationPlan(
        id=f"job-{number}",
        kind=Kind.PLANNED,
        phase=Phase.DONE,
        moves=(),
        old=RECORD.membership,
        new=RECORD.membership,
        cause="c",
        reason="r",
        policy="p",
    )
    return structs.replace(plain, **changes)
