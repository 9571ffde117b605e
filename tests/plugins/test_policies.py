"""The policies that ship with tmd."""

from __future__ import annotations

import pytest
from msgspec import structs
from tmd_policies.drain_requested import DrainRequested
from tmd_policies.observe_only import ObserveOnly
from tmd_policies.replace_failed import ReplaceFailed, ReplaceFailedConfig

from tests import values
from tests.plugins.clusters import HOSTS, RECORD
from tests.values import member, worker
from tmd.plugin import (
    Activity,
    ClusterView,
    DrainRequest,
    Exit,
    HostStatus,
    JobState,
    Phase,
    PlanKind,
    Severity,
    Strategy,
    Urgency,
)
from tmd.testing.clients import worker_status


def alert(host, **changes):
    plain = values.alert(
        host=host,
        code="trainer.stalled",
        entity=worker(host),
        severity=Severity.FATAL,
        message="silent",
        job="job",
        strategy=Strategy.ACT,
        at=0.0,
    )
    return structs.replace(plain, **changes)


def host(name, status=None, exits=(), alerts=()):
    training = structs.replace(worker_status(worker(name)), activity=Activity.TRAINING)
    return HostStatus(name, "i", workers=(status or training,), exits=exits, alerts=alerts)


def stuck(name, *suspects):
    status = worker_status(worker(name))
    return structs.replace(status, activity=Activity.STUCK, suspects=suspects)


def view(*hosts, record=RECORD, drains=()):
    return ClusterView(hosts=hosts, jobs=(record,), drains=drains)


def failed(cluster):
    verdicts = ReplaceFailed().decide(cluster)
    assert all(v.urgency is Urgency.FAILED and v.policy == "replace_failed" for v in verdicts)
    return [(v.worker, v.cause) for v in verdicts]


def plan(kind=PlanKind.FAILOVER, phase=Phase.RECOVER, dead=(), new=RECORD.membership):
    return values.plan(
        RECORD.membership,
        kind=kind,
        phase=phase,
        new=new,
        dead=dead,
        witnesses=RECORD.membership.members,
    )


# --- replace_failed -------------------------------------------------------------------------------


def test_a_healthy_cluster_gives_no_verdict():
    assert failed(view(*map(host, HOSTS))) == []


def test_an_exit_with_an_error_is_a_failure_even_before_its_alert():
    ended = Exit(worker("h1"), "job", -9, at=0.0)

    assert failed(view(host("h1", exits=(ended,)), host("h2"), host("h3"))) == [
        (worker("h1"), "trainer.exited")
    ]


def test_an_exiting_worker_is_a_failure_before_its_exit_code_is_known():
    begins = Exit(worker("h1"), "job", None, at=0.0)

    assert failed(view(host("h1", exits=(begins,)), host("h2"), host("h3"))) == [
        (worker("h1"), "trainer.exited")
    ]


def test_the_end_of_training_is_no_failure():
    ended = Exit(worker("h1"), "job", 0, at=0.0)

    assert failed(view(host("h1", exits=(ended,)))) == []


def test_a_fatal_alert_about_a_member_is_a_failure():
    assert failed(view(host("h1", alerts=(alert("h1"),)), host("h2"), host("h3"))) == [
        (worker("h1"), "trainer.stalled")
    ]


@pytest.mark.parametrize(
    "doubtful",
    [
        alert("h1", strategy=Strategy.ADVISE),
        alert("h1", strategy=Strategy.OBSERVE),
        alert("h1", severity=Severity.DEGRADED),
        alert("h1", code="nic.flapped"),
        alert("h1", entity="h1/job/7.z"),
        alert("h1", job=""),
    ],
    ids=["advise", "observe", "degraded", "other code", "holds no rank", "no job"],
)
def test_doubtful_evidence_replaces_no_worker(doubtful):
    assert failed(view(host("h1", alerts=(doubtful,)), host("h2"), host("h3"))) == []


def test_several_failures_at_once_are_all_named():
    ended = Exit(worker("h2"), "job", 1, at=0.0)
    cluster = view(host("h1", alerts=(alert("h1"),)), host("h2", exits=(ended,)), host("h3"))

    assert [w for w, _ in failed(cluster)] == [worker("h1"), worker("h2")]


def test_a_silent_host_that_a_stuck_member_suspects_is_a_failure():
    cluster = view(host("h2", stuck("h2", worker("h1"))), host("h3"))

    assert failed(cluster) == [(worker("h1"), "host.silent")]


def test_a_silent_host_alone_replaces_no_worker():
    """A daemon may restart while its trainers continue."""
    assert failed(view(host("h2"), host("h3"))) == []


def test_a_suspect_with_a_live_host_is_not_replaced():
    cluster = view(host("h1"), host("h2", stuck("h2", worker("h1"))), host("h3"))

    assert failed(cluster) == []


def test_a_known_failure_explains_the_suspicion():
    """h3 exited; that h2 also suspects h1, whose daemon is down, follows from it."""
    ended = Exit(worker("h3"), "job", -9, at=0.0)
    suspecting = stuck("h2", worker("h1"), worker("h3"))
    cluster = view(host("h2", suspecting), host("h3", exits=(ended,)))

    assert failed(cluster) == [(worker("h3"), "trainer.exited")]


def lost_gpu(name, **changes):
    found = alert(name, detector="xid", code="xid.79", entity="pci:0000:3b:00.0", job="", at=-11.0)
    return structs.replace(found, **changes)


def standing(name, seconds, **changes):
    status = structs.replace(worker_status(worker(name)), activity=Activity.TRAINING)
    return structs.replace(status, stands_s=seconds, **changes)


def test_a_finding_of_before_its_clock_was_set_back_counts():
    hung = host("h1", standing("h1", 11.0), alerts=(lost_gpu("h1", at=7200.0),))
    cluster = view(hung, host("h2", standing("h2", 11.0)), host("h3"))

    assert [v.worker for v in ReplaceFailed().decide(cluster)] == [worker("h1")]


def test_a_rank_that_stands_still_on_a_lost_gpu_is_a_failure():
    hung = host("h1", standing("h1", 11.0), alerts=(lost_gpu("h1"),))
    cluster = view(hung, host("h2", standing("h2", 11.0)), host("h3"))

    (verdict,) = ReplaceFailed().decide(cluster)

    assert (verdict.worker, verdict.cause) == (worker("h1"), "xid.79")
    assert verdict.urgency is Urgency.FAILED
    assert verdict.reason.endswith("xid.79 of pci:0000:3b:00.0, and no step for 11 s")


@pytest.mark.parametrize(
    ("status", "finding"),
    [
        (standing("h1", 9.0), lost_gpu("h1")),
        (standing("h1", 99.0), lost_gpu("h1", at=-9.0)),
        (standing("h1", 99.0), lost_gpu("h1", at=-99.0, worse_at=-9.0)),
        (standing("h1", 99.0, step_seconds=10.0), lost_gpu("h1", at=-99.0)),
        (standing("h1", 99.0, activity=Activity.STUCK), lost_gpu("h1")),
        (standing("h1", 99.0, devices=("pci:0000:5e:00.0",)), lost_gpu("h1")),
        (standing("h1", 99.0), lost_gpu("h1", strategy=Strategy.ADVISE)),
        (standing("h1", 99.0), lost_gpu("h1", severity=Severity.DEGRADED)),
    ],
    ids=[
        "not long",
        "lately",
        "lately worse",
        "long steps",
        "stuck",
        "another gpu",
        "advise",
        "degraded",
    ],
)
def test_a_fatal_finding_alone_replaces_no_worker(status, finding):
    """While the job may continue, an orderly hand-over does less harm."""
    assert failed(view(host("h1", status, alerts=(finding,)), host("h2"), host("h3"))) == []


def test_the_wait_for_a_standing_rank_is_configurable():
    hung = view(host("h1", standing("h1", 3.0), alerts=(lost_gpu("h1"),)))

    assert ReplaceFailed(ReplaceFailedConfig(patience_s=2.0)).decide(hung) != []
    assert ReplaceFailed(ReplaceFailedConfig(patience_s=4.0)).decide(hung) == []


def test_a_worker_named_dead_is_not_named_again():
    record = structs.replace(RECORD, plan=plan(dead=(worker("h1"),)))
    ended = Exit(worker("h1"), "job", -9, at=0.0)

    assert failed(view(host("h1", exits=(ended,)), host("h2"), host("h3"), record=record)) == []


def test_a_joiner_of_a_failover_can_fail_too():
    joiner = member("h4")
    new = RECORD.membership.replaced({0: joiner}, 2)
    record = structs.replace(RECORD, plan=plan(phase=Phase.SYNC, new=new))
    ended = Exit(joiner.worker, "job", -9, at=0.0)
    cluster = view(*map(host, HOSTS), host("h4", exits=(ended,)), record=record)

    assert failed(cluster) == [(joiner.worker, "trainer.exited")]


@pytest.mark.parametrize("state", [JobState.FINISHING, JobState.FINISHED, JobState.FAILED])
def test_a_job_that_ends_is_left_alone(state):
    ended = Exit(worker("h1"), "job", -9, at=0.0)
    record = structs.replace(RECORD, state=state)

    assert failed(view(host("h1", exits=(ended,)), record=record)) == []


# --- drain_requested ------------------------------------------------------------------------------


def test_a_drain_moves_every_rank_of_the_host():
    request = DrainRequest(host="h2", id="r", leave=True, by="ann")
    (verdict,) = DrainRequested().decide(view(*map(host, HOSTS), drains=(request,)))

    assert (verdict.worker, verdict.urgency, verdict.cause) == (
        worker("h2"),
        Urgency.DRAIN,
        "drain",
    )
    assert (verdict.leave, verdict.request) == (True, "r")
    assert "ann" in verdict.reason


def test_a_drain_of_a_host_without_ranks_gives_no_verdict():
    request = DrainRequest(host="h9", id="r")

    assert DrainRequested().decide(view(*map(host, HOSTS), drains=(request,))) == []


def test_a_drain_is_served_once():
    """Afterwards the host may take ranks again."""
    done = structs.replace(plan(kind=PlanKind.PLANNED, phase=Phase.DONE), request="r")
    record = structs.replace(RECORD, history=(done,))
    old, new = DrainRequest(host="h2", id="r"), DrainRequest(host="h2", id="r2")

    assert DrainRequested().decide(view(*map(host, HOSTS), record=record, drains=(old,))) == []
    assert DrainRequested().decide(view(*map(host, HOSTS), record=record, drains=(new,))) != []


def test_observe_only_never_gives_a_verdict():
    ended = Exit(worker("h1"), "job", -9, at=0.0)
    request = DrainRequest(host="h2", id="r")

    assert ObserveOnly().decide(view(host("h1", exits=(ended,)), drains=(request,))) == ()
