"""Which standbys may take a rank, and which of them gets it."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.plugins.clusters import planned
from tests.values import alert, member, record
from tmd.core.alerts.findings import BANNED
from tmd.core.planning.forming import form, why_not_formed
from tmd.core.planning.migration import PlanFacts
from tmd.core.planning.planning import steer
from tmd.core.planning.standbys import candidates, lasting
from tmd.core.values.limits import PlanLimits
from tmd.core.values.model import (
    Activity,
    ClusterView,
    Exit,
    HostStatus,
    JobState,
    Member,
    Membership,
    Move,
    Phase,
    PlanKind,
    Rehearsal,
    Severity,
    ShadowStatus,
    Strategy,
    Urgency,
    Verdict,
)
from tmd.core.values.requests import DrainRequest
from tmd.testing.clients import worker_status

RECORD = record("h1")
DEGRADED = alert(
    host="h2",
    detector="nvml",
    code="nvml.link_down",
    entity="gpu:GPU-1",
    severity=Severity.DEGRADED,
    message="m",
    strategy=Strategy.ACT,
    at=0.0,
)


def standby(host, *alerts, **changes):
    status = worker_status(f"{host}/job/0.a", activity=Activity.STANDBY)
    status = structs.replace(status, **{"world_size": 1, **changes})
    return HostStatus(host, "i", standby=True, workers=(status,), alerts=alerts)


def view(*hosts, **changes):
    return ClusterView(hosts=hosts, jobs=(RECORD,), **changes)


def chosen(cluster):
    return [m.host for m in candidates(cluster, RECORD, PlanFacts(cluster, "job"))]


FATAL = structs.replace(DEGRADED, severity=Severity.FATAL)
BAN = structs.replace(DEGRADED, code=BANNED, severity=Severity.WARNING, strategy=Strategy.ADVISE)


@pytest.mark.parametrize("alert", [FATAL, BAN], ids=["fatal", "banned"])
def test_no_rank_goes_to_a_host_that_has_failed(alert):
    assert chosen(view(standby("h2", alert), standby("h3"))) == ["h3"]


def test_a_degraded_host_takes_a_rank_only_after_a_loss():
    """A planned move to it would be followed by a move away from it."""
    ailing, idle = standby("h2", DEGRADED), standby("h3")
    both, alone = view(ailing, idle), view(ailing)

    def for_planned_moves(cluster):
        spare = candidates(cluster, RECORD, PlanFacts(cluster, "job"))
        return [m.host for m in lasting(cluster, spare)]

    assert (chosen(both), chosen(alone)) == (["h3", "h2"], ["h2"])
    assert (for_planned_moves(both), for_planned_moves(alone)) == (["h3"], [])


@pytest.mark.parametrize(
    "alert",
    [structs.replace(DEGRADED, severity=Severity.WARNING), structs.replace(DEGRADED, job="job")],
    ids=["warning", "about a worker"],
)
def test_lesser_findings_exclude_no_host(alert):
    assert chosen(view(standby("h2", alert), standby("h3"))) == ["h2", "h3"]


@pytest.mark.parametrize("strategy", [Strategy.OBSERVE, Strategy.ADVISE])
def test_a_host_with_a_grave_finding_that_may_not_act_comes_later(strategy):
    """A detector on trial excludes no host, but a host without findings is the better choice."""
    found = structs.replace(FATAL, strategy=strategy)

    assert chosen(view(standby("h2", found), standby("h3"))) == ["h3", "h2"]


# --- drained hosts --------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("served", [False, True])
def test_a_drained_host_gets_no_rank_while_the_drain_is_listed(leave, served):
    history = (planned(1, request="r"),) if served else ()
    record = structs.replace(RECORD, history=history)
    cluster = view(standby("h2"), drains=(DrainRequest("h2", "r", leave=leave),))
    cluster = structs.replace(cluster, jobs=(record,))

    assert candidates(cluster, record, PlanFacts(cluster, "job")) == []


def test_a_soft_drain_lets_the_host_come_back_once_it_holds_no_rank():
    request = DrainRequest("h1", "r", soft=True)
    waiting = view(standby("h1"), drains=(request,))
    served = structs.replace(RECORD, history=(planned(1, request="r"),))

    assert chosen(waiting) == []
    assert [m.host for m in candidates(waiting, served, PlanFacts(waiting, "job"))] == ["h1"]


def test_a_planned_move_leaves_a_host_empty_that_a_soft_drain_has_emptied():
    """Somebody is about to switch it off, though it would serve after a loss."""
    training = worker_status("h1/job/0.a", activity=Activity.TRAINING)
    holder = HostStatus("h1", "i", workers=(structs.replace(training, world_size=1, step=5),))
    drained = view(holder, standby("h2"), drains=(DrainRequest("h2", "r", soft=True),))
    record = structs.replace(RECORD, history=(planned(0, request="r"),))
    wish = Verdict("job", "h1/job/0.a", Urgency.DRAIN, "c", "r")

    def after(cluster):
        return steer(record, cluster, [wish], now=0.0, age=0.0, limits=PlanLimits())

    assert after(drained).plan is None
    assert after(drained).detail == (
        "moving the ranks of h1 waits for 1 standby: not h2/job/0.a: its host is drained, and "
        "gets a rank only after a loss"
    )
    assert after(structs.replace(drained, drains=())).plan.moves[0].joiner.host == "h2"


def test_a_drained_host_in_reserve_comes_last_and_only_after_a_loss():
    drains = (DrainRequest("h2", "r", reserve=True),)
    cluster = view(standby("h2"), standby("h3"), drains=drains)
    found = candidates(cluster, RECORD, PlanFacts(cluster, "job"))
    after = recovering(standby("h2", world_size=2), drains=drains)

    assert [m.host for m in found] == ["h3", "h2"]
    assert [m.host for m in lasting(cluster, found)] == ["h3"]
    assert after.plan.moves[0].joiner.host == "h2"


def test_a_planned_move_waits_with_a_reason_if_only_a_drained_host_has_a_standby():
    training = worker_status("h1/job/0.a", activity=Activity.TRAINING)
    holder = HostStatus("h1", "i", workers=(structs.replace(training, world_size=1, step=5),))
    cluster = view(holder, standby("h2"), drains=(DrainRequest("h2", "r"),))
    wish = Verdict("job", "h1/job/0.a", Urgency.DRAIN, "c", "r")
    after = steer(RECORD, cluster, [wish], now=0.0, age=0.0, limits=PlanLimits())

    assert after.plan is None
    assert after.detail == (
        "moving the ranks of h1 waits for 1 standby: not h2/job/0.a: its host is drained "
        "('tmd undrain h2' gives it back)"
    )


def test_a_lost_rank_holds_with_a_reason_if_only_a_drained_host_has_a_standby():
    after = recovering(standby("h2", world_size=2), drains=(DrainRequest("h2", "r"),))

    assert after.plan.phase is Phase.RECOVER
    assert after.detail.startswith("no standby for rank 0: not h2/job/0.a: its host is drained")


@pytest.mark.parametrize("suspect", [False, True])
def test_a_worker_that_was_refused_in_a_move_gets_no_rank_after_a_loss(suspect):
    """Until it has rehearsed: the verdict concerns the machine, or all ranks with that role."""
    verdict = Rehearsal(step=5, seconds=1.0, refusal="other bits", suspect=suspect)
    after = recovering(standby("h2", world_size=2, rehearsed=(verdict,)))
    again = recovering(standby("h2", world_size=2, rehearsed=DONE))

    assert "not h2/job/0.a: it failed its rehearsal: other bits" in after.detail
    assert again.plan.phase is Phase.SYNC


def test_a_new_job_takes_no_ranks_to_drained_hosts():
    fresh = [
        HostStatus(
            host, "i", workers=(structs.replace(worker_status(f"{host}/job/0.a"), world_size=1),)
        )
        for host in ("h1", "h2")
    ]
    drained = ClusterView(hosts=tuple(fresh), drains=(DrainRequest("h1", "r"),))
    formed = form(drained, "job")

    assert formed is not None
    assert [m.host for m in formed.membership.members] == ["h2"]
    assert form(structs.replace(drained, hosts=tuple(fresh[:1])), "job") is None


# --- the order, and its reasons -------------------------------------------------------------------


def failover(host):
    move = Move(rank=0, leaver=Member("x", host, "x:1"))
    return planned(1, kind=PlanKind.FAILOVER, moves=(move,))


DONE = (Rehearsal(step=5, seconds=1.0),)


def test_rehearsed_standbys_come_first_then_those_whose_host_lost_no_rank():
    """After a loss or a policy's decision; an operator's drain does not count."""
    moved = structs.replace(failover("h3"), kind=PlanKind.PLANNED)
    drained = structs.replace(failover("h4"), kind=PlanKind.PLANNED, request="r")
    record = structs.replace(RECORD, history=(failover("h2"), moved, drained))
    spare = [standby(h, rehearsed=DONE) for h in ("h2", "h3", "h4")] + [standby("h1b")]
    cluster = structs.replace(view(*spare), jobs=(record,))

    found = [m.host for m in candidates(cluster, record, PlanFacts(cluster, "job"))]
    assert found == ["h4", "h2", "h3", "h1b"]


def test_a_planned_move_records_its_choice():
    training = worker_status("h1/job/0.a", activity=Activity.TRAINING)
    holder = HostStatus("h1", "i", workers=(structs.replace(training, world_size=1, step=5),))
    cluster = view(holder, standby("h2"), standby("h3"))
    wish = Verdict("job", "h1/job/0.a", Urgency.DRAIN, "c", "r")
    plan = steer(RECORD, cluster, [wish], now=0.0, age=0.0, limits=PlanLimits()).plan

    assert [m.joiner.host for m in plan.moves] == ["h2"]
    assert [line.split(":")[0] for line in plan.choice] == ["rank 0", "not h3/job/0.a"]


def recovering(*hosts, replicas=(0, 1), beside=(), **changes):
    """The record after a loss of one of two ranks that are replicas; ``hosts`` have standbys, and
    the workers ``beside`` are on the host of the survivor, ``h4``."""
    members = (*RECORD.membership.members, member("h4"))
    record = structs.replace(RECORD, world_size=2, membership=Membership(1, members))
    wish = Verdict("job", "h1/job/0.a", Urgency.FAILED, "c", "r")
    survivor = worker_status("h4/job/0.a", activity=Activity.STUCK)
    survivor = structs.replace(
        survivor, world_size=2, rank=1, epoch=1, step=5, replicas=replicas, plan="job-2"
    )
    dead = HostStatus("h1", "i", exits=(Exit("h1/job/0.a", "job", -9, 0.0),))
    cluster = view(dead, HostStatus("h4", "i", workers=(survivor, *beside)), *hosts, **changes)
    opened = steer(record, cluster, [wish], now=0.0, age=0.0, limits=PlanLimits())
    return steer(opened, cluster, [wish], now=0.0, age=PlanLimits().settle_s, limits=PlanLimits())


def test_a_failover_records_its_choice():
    settled = recovering(standby("h2", world_size=2))

    assert settled.plan.phase is Phase.SYNC
    assert settled.plan.choice[0].startswith("rank 0: h2/job/0.a")


# --- reasons for the reader -----------------------------------------------------------------------


def test_a_planned_move_names_a_degraded_host_of_the_only_standby():
    training = worker_status("h1/job/0.a", activity=Activity.TRAINING)
    holder = HostStatus("h1", "i", workers=(structs.replace(training, world_size=1, step=5),))
    cluster = view(holder, standby("h2", DEGRADED))
    wish = Verdict("job", "h1/job/0.a", Urgency.DRAIN, "c", "r")
    after = steer(RECORD, cluster, [wish], now=0.0, age=0.0, limits=PlanLimits())

    assert after.detail.endswith(
        "waits for 1 standby: not h2/job/0.a: its host has a grave finding"
    )


def test_a_clean_host_is_taken_before_one_with_a_finding_that_may_not_act():
    """This holds even if the other one has rehearsed."""
    found = structs.replace(FATAL, strategy=Strategy.OBSERVE)
    after = recovering(
        standby("h2", found, world_size=2, rehearsed=DONE), standby("h3", world_size=2)
    )

    assert [m.joiner.host for m in after.plan.moves] == ["h3"]


def test_a_job_waits_for_a_state_that_only_a_drained_standby_has():
    """The state is unique, there is no snapshot, and its hot standby is on a drained host."""
    follows = ShadowStatus(rank=0, copied=1.0, verified=5)
    keeper = standby("h2", world_size=2, shadow=follows, step=5)
    drained = {"drains": (DrainRequest("h2", "r"),)}
    held = recovering(keeper, replicas=(1,), **drained)
    given_back = recovering(keeper, replicas=(1,))
    gone = recovering(replicas=(1,))

    assert held.state is JobState.RUNNING
    assert held.detail.startswith(
        "only h2/job/0.a has the state of rank 0, and its host is drained"
    )
    assert given_back.plan.phase is Phase.SYNC
    assert gone.state is JobState.FAILED


@pytest.mark.parametrize(
    "drain", [DrainRequest("h4", "r", soft=True), DrainRequest("h4", "r", reserve=True)]
)
def test_a_job_waits_for_a_state_on_a_host_from_which_a_rank_is_to_move(drain):
    """Until the rank has left, also a milder drain keeps the standby there from another rank."""
    follows = ShadowStatus(rank=0, copied=1.0, verified=5)
    keeper = worker_status("h4/job/1.a", activity=Activity.STANDBY)
    keeper = structs.replace(keeper, world_size=2, shadow=follows, step=5)
    held = recovering(beside=(keeper,), replicas=(1,), drains=(drain,))
    given_back = recovering(beside=(keeper,), replicas=(1,))

    assert held.state is JobState.RUNNING
    assert held.detail.startswith(
        "only h4/job/1.a has the state of rank 0, and its host is drained"
    )
    assert given_back.plan.phase is Phase.SYNC


def test_a_job_that_cannot_form_because_of_a_drain_says_so():
    fresh = structs.replace(worker_status("h1/job/0.a"), world_size=1)
    hosts = (HostStatus("h1", "i", workers=(fresh,)),)

    assert why_not_formed(ClusterView(hosts=hosts), "job") == ""
    assert "drained: h1" in why_not_formed(
        ClusterView(hosts=hosts, drains=(DrainRequest("h1", "r"),)), "job"
    )
