"""Views of a cluster that trains one job on one host per rank."""

from __future__ import annotations

from msgspec import structs

from tests.values import alert, plan, record, worker
from tmd.plugin import Activity, ClusterView, HostStatus, Pace, Severity, Strategy
from tmd.testing.clients import worker_status

HOSTS = ("h1", "h2", "h3")


RECORD = record(*HOSTS)


def finding(host="h2", **changes):
    """About a GPU, by a detector that may act."""
    plain = alert(
        id=f"{host}-1",
        host=host,
        detector="nvml",
        code="nvml.ecc",
        entity="gpu:GPU-1",
        severity=Severity.DEGRADED,
        message="a row is to be remapped",
        strategy=Strategy.ACT,
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
    """All hosts with ranks are healthy unless ``hosts`` differs."""
    given = {h.host: h for h in hosts}
    names = [*HOSTS, *(n for n in given if n not in HOSTS)]
    return ClusterView(
        hosts=tuple(given.get(n) or host(n) for n in names), jobs=(record,), **changes
    )


def pace(lost_s):
    return Pace(step=500, busy_s=1.3, ratio=1.3, slow_since=400, lost_s=lost_s)


def planned(number, **changes):
    """A plan made by a policy."""
    return plan(RECORD.membership, **{"id": f"job-{number}", "policy": "p", **changes})
