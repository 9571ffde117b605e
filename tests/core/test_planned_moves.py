"""Chooses the source of a joiner's state."""

from msgspec import structs

from tests.core.test_hot_standbys import cluster, worker
from tests.values import alert
from tmd.core.planning.directives import Prepare, directive_of
from tmd.core.planning.planning import steer
from tmd.core.values.limits import PlanLimits
from tmd.core.values.model import (
    Activity,
    Alert,
    JobRecord,
    MigrationPlan,
    Severity,
    Urgency,
    Verdict,
)

WANTED = Verdict(job="j", worker="a", urgency=Urgency.DRAIN, cause="drain", reason="asked")


def ailing(host: str, severity: Severity) -> Alert:
    return alert(host=host, code="nic.errors", entity="nic:eth0", severity=severity)


def planned(
    *alerts: Alert, replicas: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 1), (0, 1))
) -> tuple[JobRecord, MigrationPlan]:
    """The plan that moves rank 0 off host h-a, while ``alerts`` are raised."""
    record, view, _ = cluster(worker("s"))
    hosts = []
    for host in view.hosts:
        raised = tuple(a for a in alerts if a.host == host.host)
        status = host.workers[0]
        if status.activity is Activity.TRAINING:
            assert status.rank is not None
            status = structs.replace(status, replicas=replicas[status.rank])
        hosts.append(structs.replace(host, workers=(status,), alerts=raised))
    view = structs.replace(view, hosts=tuple(hosts))
    after = steer(record, view, [WANTED], now=0.0, age=0.0, limits=PlanLimits())
    assert after.plan is not None
    return after, after.plan


def test_the_leaver_is_the_source_by_default() -> None:
    record, plan = planned()
    joins = directive_of(record, "s")

    assert plan.moves[0].source == plan.moves[0].leaver
    assert isinstance(joins, Prepare)
    assert (joins.rank, joins.plays) == (0, 0)


def test_a_replica_is_the_source_if_the_leavers_host_is_degraded() -> None:
    """A warning does not suffice, and the replica's own host must be sound."""
    record, plan = planned(ailing("h-a", Severity.DEGRADED))
    joins = directive_of(record, "s")

    assert plan.moves[0].source is not None
    assert plan.moves[0].source.worker == "b"
    assert isinstance(joins, Prepare)
    assert (joins.rank, joins.plays, joins.source.worker) == (0, 1, "b")
    for alerts in (
        [ailing("h-a", Severity.WARNING)],
        [ailing("h-a", Severity.FATAL), ailing("h-b", Severity.DEGRADED)],
    ):
        _, plan = planned(*alerts)
        assert plan.moves[0].source == plan.moves[0].leaver


def test_the_leaver_is_the_source_if_it_has_no_replica() -> None:
    _, plan = planned(ailing("h-a", Severity.FATAL), replicas=((0,), (1,)))

    assert plan.moves[0].source == plan.moves[0].leaver
