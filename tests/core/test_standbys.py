"""Which standbys may take a rank, and which one does."""

from __future__ import annotations

import pytest
from msgspec import structs

from tmd.core.findings import BANNED
from tmd.core.migration import Facts
from tmd.core.model import (
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
from tmd.core.standbys import candidates
from tmd.testing.clients import worker_status

RECORD = JobRecord(
    job="job",
    world_size=1,
    state=JobState.RUNNING,
    membership=Membership(1, (Member("h1/job/0.a", "h1", "h1:1"),)),
    proposed=1,
)
DEGRADED = Alert(
    id="1",
    host="h2",
    detector="nvml",
    code="nvml.link_down",
    entity="gpu:GPU-1",
    severity=Severity.DEGRADED,
    state=State.RAISED,
    message="m",
    job="",
    strategy=Strategy.ACT,
    count=1,
    at=0.0,
)


def standby(host, *alerts, **changes):
    status = worker_status(f"{host}/job/0.a", activity=Activity.STANDBY)
    status = structs.replace(status, world_size=1, **changes)
    return HostStatus(host, "i", standby=True, workers=(status,), alerts=alerts)


def view(*hosts, **changes):
    return ClusterView(hosts=hosts, jobs=(RECORD,), **changes)


def chosen(cluster):
    return [m.host for m in candidates(cluster, RECORD, Facts(cluster, "job"))]


@pytest.mark.parametrize(
    "alert",
    [
        DEGRADED,
        structs.replace(DEGRADED, severity=Severity.FATAL),
        structs.replace(DEGRADED, code=BANNED, severity=Severity.WARNING, strategy=Strategy.ADVISE),
    ],
    ids=["degraded", "fatal", "banned"],
)
def test_no_rank_goes_to_a_host_that_would_be_left_again(alert):
    assert chosen(view(standby("h2", alert), standby("h3"))) == ["h3"]


@pytest.mark.parametrize(
    "alert",
    [
        structs.replace(DEGRADED, severity=Severity.WARNING),
        structs.replace(DEGRADED, strategy=Strategy.ADVISE),
        structs.replace(DEGRADED, strategy=Strategy.OBSERVE),
        structs.replace(DEGRADED, job="job"),
    ],
    ids=["warning", "advise", "observe", "about a worker"],
)
def test_less_keeps_no_host_out(alert):
    assert chosen(view(standby("h2", alert), standby("h3"))) == ["h2", "h3"]
