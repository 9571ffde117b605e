"""Policies that move ranks off hosts that still work: never without evidence, with a reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tmd_detectors.xid.switches import Switches
from tmd_detectors.xid.switchlines import read
from tmd_detectors.xid.sxids import load
from tmd_policies.drain_degraded import DrainDegraded, DrainDegradedConfig
from tmd_policies.rebalance_periodic import RebalancePeriodic, RebalancePeriodicConfig
from tmd_policies.rebalance_stragglers import CONFIRMED_STEPS, RebalanceStragglers
from tmd_policies.replace_failed import ReplaceFailed

from tests.plugins.clusters import HOSTS, RECORD, cluster, finding, host, pace, planned, slow
from tests.values import member, worker
from tmd.core.planning import stragglers
from tmd.plugin import (
    Activity,
    JobState,
    Mark,
    Membership,
    Move,
    Phase,
    PlanKind,
    Severity,
    Strategy,
    Urgency,
)


def moved(policy, view):
    verdicts = policy.decide(view)
    assert all(v.urgency is Urgency.DRAIN and v.policy == policy.name for v in verdicts)
    return [v.worker for v in verdicts]


# --- drain_degraded -------------------------------------------------------------------------------


@pytest.mark.parametrize("severity", [Severity.DEGRADED, Severity.FATAL])
def test_a_grave_finding_about_a_host_drains_its_ranks(severity):
    view = cluster(host("h2", finding(severity=severity)))
    (verdict,) = DrainDegraded().decide(view)

    assert (verdict.worker, verdict.cause, verdict.urgency) == (
        worker("h2"),
        "nvml.ecc",
        Urgency.DRAIN,
    )
    assert "gpu:GPU-1" in verdict.reason
    assert "a row is to be remapped" in verdict.reason


def test_every_rank_of_the_host_is_drained():
    two = tuple(structs.replace(member("h2"), worker=f"h2/job/{n}.a") for n in (0, 1))
    record = structs.replace(RECORD, membership=Membership(1, (member("h1"), *two)))
    view = cluster(host("h2", finding()), record=record)

    assert moved(DrainDegraded(), view) == ["h2/job/0.a", "h2/job/1.a"]


def shared(*alerts, devices=()):
    """h2 holds two ranks; ``devices`` are their workers' GPUs."""
    two = tuple(structs.replace(member("h2"), worker=f"h2/job/{n}.a") for n in (0, 1))
    record = structs.replace(RECORD, membership=Membership(1, (member("h1"), *two)))
    plain = host("h2", *alerts)
    statuses = tuple(
        structs.replace(plain.workers[0], worker=m.worker, devices=used)
        for m, used in zip(two, devices, strict=True)
    )
    return cluster(structs.replace(plain, workers=statuses), record=record)


LOST = finding(code="xid.79", severity=Severity.FATAL, entity="pci:0000:3b:00.0")


def test_a_finding_about_a_gpu_drains_those_that_use_it():
    devices = [("pci:0000:1b:00.0",), ("pci:0000:3b:00.0",)]

    assert moved(DrainDegraded(), shared(LOST, devices=devices)) == ["h2/job/1.a"]


def test_a_gpu_finding_moves_only_ranks_that_may_use_the_gpu():
    """Its worker may have exited already."""
    assert moved(DrainDegraded(), shared(LOST, devices=[("pci:0000:1b:00.0",)] * 2)) == []


def test_a_rank_with_an_unknown_gpu_is_drained_too():
    devices = [("pci:0000:3b:00.0",), ()]

    assert len(moved(DrainDegraded(), shared(LOST, devices=devices))) == 2


def test_a_fatal_error_of_an_nvswitch_concerns_all_gpus_of_its_host():
    """Their ranks leave while steps are committed; an alert about it moves none."""
    devices = [("pci:0000:1b:00.0",), ("pci:0000:3b:00.0",)]
    text = "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, {}, Link 63 LTSSM Fault Up"

    def ranks_that_leave(word):
        signal = next(Switches(load(), (), 0.0).observe(read(text.format(word)), 0.0))
        alert = finding(code=signal.code, severity=signal.severity, entity=signal.entity)
        return moved(DrainDegraded(), shared(alert, devices=devices))

    assert ranks_that_leave("Fatal") == ["h2/job/0.a", "h2/job/1.a"]
    assert ranks_that_leave("Non-fatal") == []


def test_a_finding_about_more_than_a_gpu_drains_all():
    """The gravest one that concerns a rank is the reason for it."""
    devices = [("pci:0000:1b:00.0",), ("pci:0000:3b:00.0",)]
    view = shared(LOST, finding(entity="nic:mlx5_0/1", code="nic.flap"), devices=devices)

    assert [v.cause for v in DrainDegraded().decide(view)] == ["nic.flap", "xid.79"]


def test_the_gravest_finding_is_the_reason():
    fatal = finding(code="nvml.missing", severity=Severity.FATAL)
    (verdict,) = DrainDegraded().decide(cluster(host("h2", finding(), fatal)))

    assert verdict.cause == "nvml.missing"


@pytest.mark.parametrize(
    "milder",
    [
        finding(severity=Severity.WARNING),
        finding(severity=Severity.INFO),
        finding(strategy=Strategy.ADVISE),
        finding(strategy=Strategy.OBSERVE),
        finding(job="job", entity=worker("h2")),
        finding(stated=Severity.WARNING),
    ],
    ids=["warning", "info", "advise", "observe", "about a worker", "only came back"],
)
def test_a_lesser_finding_drains_nothing(milder):
    assert moved(DrainDegraded(), cluster(host("h2", milder))) == []


def test_a_recurring_finding_drains_if_configured():
    policy = DrainDegraded(DrainDegradedConfig(repeated=True))

    assert moved(policy, cluster(host("h2", finding(stated=Severity.WARNING)))) == [worker("h2")]


@pytest.mark.parametrize("state", [JobState.FINISHING, JobState.FINISHED, JobState.FAILED])
def test_a_job_that_ends_is_left_alone(state):
    record = structs.replace(RECORD, state=state)
    view = cluster(host("h2", finding(), slow(), pace=pace(1e6), at=1e9), record=record)

    for policy in (DrainDegraded(), RebalanceStragglers(), RebalancePeriodic()):
        assert moved(policy, view) == []


# --- rebalance_stragglers -------------------------------------------------------------------------

WITNESS = finding(code="nvml.slowed", severity=Severity.WARNING, strategy=Strategy.ADVISE)


def test_a_slow_rank_is_moved_once_it_has_cost_as_much_as_a_move():
    def seen(lost):
        view = cluster(host("h2", slow(), WITNESS, pace=pace(lost)))
        return moved(RebalanceStragglers(), view)

    assert seen(29.9) == []
    assert seen(30.0) == [worker("h2")]


def test_the_cost_of_a_move_is_measured():
    """From the switch to the next first commit; only completed planned moves count."""
    marks = (Mark(Phase.PREPARE, 0.0), Mark(Phase.SWITCH, 50.0), Mark(Phase.DONE, 150.0))
    failover = planned(
        1, kind=PlanKind.FAILOVER, timeline=(Mark(Phase.SWITCH, 0), Mark(Phase.DONE, 999))
    )
    record = structs.replace(RECORD, history=(failover, planned(2, timeline=marks)))

    def seen(lost):
        view = cluster(host("h2", slow(), WITNESS, pace=pace(lost)), record=record)
        return moved(RebalanceStragglers(), view)

    assert seen(99.0) == []
    assert seen(100.0) == [worker("h2")]


def test_the_reason_names_the_figures_and_the_witness():
    view = cluster(host("h2", slow(), WITNESS, pace=pace(42.0)))
    (verdict,) = RebalanceStragglers().decide(view)

    for word in ("1.30 times", "step 400", "42 s", "30 s", "nvml.slowed"):
        assert word in verdict.reason


@pytest.mark.parametrize(
    "witness",
    [
        structs.replace(WITNESS, strategy=Strategy.OBSERVE),
        structs.replace(WITNESS, severity=Severity.INFO),
        structs.replace(WITNESS, code="host.disk_full"),
        structs.replace(WITNESS, code="nic.unreadable"),
        structs.replace(WITNESS, at=100.0 + 601),
        structs.replace(WITNESS, at=100.0 - 601 - 1.3 * CONFIRMED_STEPS),
    ],
    ids=["observes", "remark", "explains nothing", "saw nothing", "later", "earlier"],
)
def test_unexplained_slowness_moves_no_rank(witness):
    """The workload is as often the cause: a new host would be as slow."""
    view = cluster(host("h2", slow(), witness, pace=pace(1e6)))

    assert moved(RebalanceStragglers(), view) == []


@pytest.mark.parametrize(("step_s", "leaves"), [(30.0, True), (1.0, False)])
def test_a_witness_from_the_onset_of_slowness_counts_however_long_a_step_takes(step_s, leaves):
    """Slowness is confirmed over a number of steps, not within a time."""
    witness = structs.replace(WITNESS, at=100.0 - 30.0 * CONFIRMED_STEPS)
    slowed = host("h2", slow(), witness, pace=structs.replace(pace(1e6), busy_s=step_s))
    # The latest step alone says nothing: it may have waited for an evaluation.
    worker_of = structs.replace(slowed.workers[0], step_seconds=500.0)
    view = cluster(structs.replace(slowed, workers=(worker_of,)))

    assert bool(moved(RebalanceStragglers(), view)) is leaves


@pytest.mark.parametrize(("worse_at", "leaves"), [(95.0, True), (100.0 + 601, False)])
def test_a_witness_that_gets_worse_when_the_rank_becomes_slow_counts(worse_at, leaves):
    """A card that is throttled now and then is throttled hard."""
    witness = structs.replace(
        WITNESS, severity=Severity.DEGRADED, at=100.0 - 2400, worse_at=worse_at
    )
    view = cluster(host("h2", slow(), witness, pace=pace(1e6)))

    assert bool(moved(RebalanceStragglers(), view)) is leaves


def test_slowness_is_confirmed_within_the_steps_that_the_policy_grants():
    """A window that is slow only in part may not be flagged."""
    assert CONFIRMED_STEPS >= (stragglers.WINDOW + stragglers.OF) * stragglers.BLOCK


@pytest.mark.parametrize(
    "code",
    [
        *("xid.no_log", "xid.no_events", "xid.log_lost", "xid.place_not_kept"),
        *("nic.ports_not_kept", "nic.unreadable"),
    ],
)
def test_a_detectors_findings_about_itself_are_no_evidence(code):
    witness = finding(code=code, severity=Severity.WARNING, entity="host")
    view = cluster(host("h2", slow(), witness, pace=pace(1e6)))

    assert moved(RebalanceStragglers(), view) == []


@pytest.mark.parametrize(("severity", "leaves"), [("warning", False), ("fatal", True)])
def test_only_a_fatal_switch_error_is_evidence(severity, leaves):
    """Also an unknown error: the GPU on the link is unknown."""
    witness = finding(
        code="xid.sxid.99999", severity=Severity(severity), entity="nvswitch:0000:05:00.0"
    )
    view = cluster(host("h2", slow(), witness, pace=pace(1e6)))

    assert bool(moved(RebalanceStragglers(), view)) is leaves


def test_a_finding_on_another_host_is_no_witness():
    view = cluster(host("h2", slow(), pace=pace(1e6)), host("h3", WITNESS))

    assert moved(RebalanceStragglers(), view) == []


@pytest.mark.parametrize(("gpu", "leaves"), [("1b", False), ("3b", True)])
def test_a_finding_about_another_ranks_gpu_is_no_evidence(gpu, leaves):
    witness = finding(code="nvml.slowed", entity=f"pci:0000:{gpu}:00.0")
    slowed = host("h2", slow(), witness, pace=pace(1e6))
    worker_of = structs.replace(slowed.workers[0], devices=("pci:0000:3b:00.0",))
    view = cluster(structs.replace(slowed, workers=(worker_of,)))

    assert bool(moved(RebalanceStragglers(), view)) is leaves


def test_slowness_of_all_ranks_of_a_host_is_evidence():
    two = tuple(structs.replace(member("h2"), worker=f"h2/job/{n}.a") for n in (0, 1))
    record = structs.replace(RECORD, membership=Membership(1, (member("h1"), *two)))

    def seen(*entities):
        alerts = tuple(slow(entity=e) for e in entities)
        base = host("h2", *alerts)
        workers = tuple(
            structs.replace(base.workers[0], worker=m.worker, pace=pace(99.0)) for m in two
        )
        view = cluster(structs.replace(base, workers=workers), record=record)
        return moved(RebalanceStragglers(), view)

    assert seen("h2/job/0.a") == []
    assert seen("h2/job/0.a", "h2/job/1.a") == ["h2/job/0.a", "h2/job/1.a"]


def test_a_rank_that_has_recovered_its_speed_stays():
    well = structs.replace(pace(99.0), slow_since=None)

    assert moved(RebalanceStragglers(), cluster(host("h2", slow(), WITNESS, pace=well))) == []


# --- rebalance_periodic ---------------------------------------------------------------------------

DAILY = RebalancePeriodic(RebalancePeriodicConfig(every_s=86_400))
SPARE = host("h4", activity=Activity.STANDBY, at=1e6)
RANKS = [host(name, at=1e6) for name in HOSTS]


def test_the_ranks_longest_in_place_move_after_each_period():
    """h1 got its rank by a move, h2 and h3 when the job formed."""
    move = Move(rank=0, leaver=member("h9"), joiner=member("h1"))
    ended = planned(1, moves=(move,), timeline=(Mark(Phase.DONE, 1e6 - 86_400),))
    record = structs.replace(RECORD, history=(ended,))
    late = structs.replace(ended, timeline=(Mark(Phase.DONE, 1e6 - 86_399),))

    assert moved(DAILY, cluster(*RANKS, SPARE, record=record)) == [worker("h2")]
    record = structs.replace(record, history=(late,))
    assert moved(DAILY, cluster(*RANKS, SPARE, record=record)) == []


def test_one_host_whose_clock_is_ahead_moves_no_rank():
    ended = planned(1, timeline=(Mark(Phase.DONE, 1e6 - 10),))
    record = structs.replace(RECORD, history=(ended,))
    ahead = structs.replace(SPARE, at=1e6 + 2 * 86_400)

    assert moved(DAILY, cluster(*RANKS, ahead, record=record)) == []


def test_without_a_standby_there_is_no_verdict():
    assert moved(DAILY, cluster(*RANKS)) == []


def test_a_move_that_was_dropped_waits_for_the_next_period():
    dropped = planned(1, phase=Phase.ABORTED, timeline=(Mark(Phase.ABORTED, 1e6 - 5),))
    record = structs.replace(RECORD, history=(dropped,))

    assert moved(DAILY, cluster(*RANKS, SPARE, record=record)) == []


# --- strategies -----------------------------------------------------------------------------------

ALERTS = st.builds(
    finding,
    host=st.sampled_from(HOSTS),
    detector=st.sampled_from(["nvml", "straggler", "trainer", "nic"]),
    code=st.sampled_from(["nvml.slowed", "straggler.slow", "trainer.stalled", "nic.down"]),
    entity=st.sampled_from(["gpu:GPU-1", *map(worker, HOSTS)]),
    severity=st.sampled_from(list(Severity)),
    strategy=st.sampled_from([Strategy.OBSERVE, Strategy.ADVISE]),
    job=st.sampled_from(["", "job"]),
    stated=st.sampled_from([None, Severity.WARNING]),
)


@given(st.lists(ALERTS, max_size=8))
def test_observe_and_advise_never_move_a_rank(alerts):
    """Whatever is raised, however grave, with any code, and however slow all ranks are."""
    hosts = [host(name, *(a for a in alerts if a.host == name), pace=pace(1e9)) for name in HOSTS]
    view = cluster(*hosts)

    for policy in (
        DrainDegraded(DrainDegradedConfig(repeated=True)),
        RebalanceStragglers(),
        ReplaceFailed(),
    ):
        assert list(policy.decide(view)) == []
