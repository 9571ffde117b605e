"""What each setup makes of faults, and what holds for all of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tests.simulate.studies import COSTS, fault, lost_s, played, study
from tmd.simulate.compare import outcome, setups
from tmd.simulate.values import HOUR, Fault, FaultScope, RecoveryMethod, RecoverySetup, Warned

ROUNDING_H = 1e-9
AT = 1004.0
"""In the middle of a step: 4 s of it are done."""


def test_nothing_is_lost_without_a_fault() -> None:
    for setup in setups(list(RecoveryMethod), 2):
        assert outcome(study(), (), setup).lost == {}


def test_a_restart_repeats_what_is_not_saved() -> None:
    assert lost_s(played(RecoveryMethod.RESTART, 1, fault(AT))) == {
        "repeated_steps": AT,
        "restart": 400.0,
    }


def test_what_a_checkpoint_has_saved_is_not_repeated() -> None:
    costs = structs.replace(COSTS, save_s=10.0)
    found = lost_s(
        played(RecoveryMethod.RESTART, 1, fault(AT), asked=study(costs=costs, checkpoint_s=300.0))
    )

    # Three checkpoints within 930 s; the rest of the time is training since the last one began.
    assert found["repeated_steps"] == pytest.approx(AT - 930.0)
    assert found["restart"] == 400.0


def test_a_checkpoint_that_costs_nothing_is_taken_after_each_step() -> None:
    asked = structs.replace(study(), checkpoint_every_s=None)
    found = lost_s(played(RecoveryMethod.RESTART, 1, fault(AT), asked=asked))

    assert found == {"repeated_steps": 4.0, "restart": 400.0}


def test_a_standby_costs_its_take_over_and_a_warm_one_the_step() -> None:
    warm, hot = (
        played(k, 1, fault(AT, place=3)) for k in (RecoveryMethod.WARM, RecoveryMethod.HOT)
    )

    assert lost_s(warm) == {"interrupted_step": 4.0, "failover": 20.0}
    assert lost_s(hot) == {"failover": 5.0}


def test_a_hot_standby_of_a_replica_saves_no_step() -> None:
    """It follows rank 3, and rank 0 is lost."""
    found = played(RecoveryMethod.HOT, 1, fault(AT, place=0))

    assert lost_s(found) == {"interrupted_step": 4.0, "failover": 20.0}


def test_a_shadow_that_is_not_yet_in_step_is_a_warm_standby() -> None:
    found = played(RecoveryMethod.HOT, 1, fault(COSTS.prepare_s - 10.0, place=3))

    assert lost_s(found)["failover"] == COSTS.warm_s


def test_a_worker_that_ends_while_the_job_holds_does_not_start_it() -> None:
    """Another host is still missing."""
    worker = fault(AT + 60, place=1, scope=FaultScope.WORKER)
    found = played(RecoveryMethod.RESTART, 0, fault(AT, repair_h=2.0), worker)

    assert lost_s(found)["hold"] == 2 * HOUR


def test_without_a_standby_the_job_holds_until_the_host_is_back() -> None:
    found = played(RecoveryMethod.WARM, 0, fault(AT, repair_h=2.0))

    assert lost_s(found) == {"interrupted_step": 4.0, "failover": 20.0, "hold": 2 * HOUR}


def test_a_unique_state_returns_to_its_latest_snapshot() -> None:
    """Snapshots after each ten steps of 10 s: 4 s of a step and no whole one are lost at 1004 s."""
    found = played(RecoveryMethod.WARM, 1, fault(AT + 30), asked=study(replica_hosts=4))

    assert lost_s(found) == {"interrupted_step": 4.0, "failover": 20.0, "repeated_steps": 30.0}


def test_a_hot_standby_keeps_a_unique_state() -> None:
    """Nothing is rolled back if it follows the lost rank."""
    found = played(RecoveryMethod.HOT, 1, fault(AT + 30, place=3), asked=study(replica_hosts=4))

    assert lost_s(found) == {"failover": 5.0}


def test_two_neighbours_at_once_cost_a_unique_state_and_the_job_restarts() -> None:
    """The second copy of a state is on the next host."""
    found = played(
        RecoveryMethod.WARM, 2, fault(AT, 1), fault(AT + 1, 2), asked=study(replica_hosts=4)
    )

    assert found.lost["restart"] == pytest.approx(COSTS.restart_s / HOUR)


def test_a_second_loss_in_a_failover_begins_it_again() -> None:
    found = played(RecoveryMethod.WARM, 2, fault(AT), fault(AT + 5, place=1))

    assert lost_s(found) == {"interrupted_step": 4.0, "failover": 25.0}


def test_the_loss_of_the_joiner_in_a_failover_takes_the_next_standby() -> None:
    found = played(RecoveryMethod.WARM, 2, fault(AT), fault(AT + 5))

    assert lost_s(found) == {"interrupted_step": 4.0, "failover": 25.0}
    assert found.faults == 2


def test_a_drain_moves_the_rank_before_its_host_is_taken() -> None:
    drained = fault(2 * HOUR, warned=Warned.DRAIN)

    assert lost_s(played(RecoveryMethod.WARM, 1, drained)) == {"planned_move": 2.0}
    assert lost_s(played(RecoveryMethod.RESTART, 1, drained)) == {"planned_move": 400.0}


def test_a_second_drain_is_served_before_the_first_host_is_taken() -> None:
    """The first move has ended with the next step."""
    first = fault(2 * HOUR, 0, warned=Warned.DRAIN, notice_s=HOUR)
    second = fault(1.5 * HOUR, 1, warned=Warned.DRAIN, notice_s=HOUR / 4)
    found = played(RecoveryMethod.WARM, 2, first, second)

    assert lost_s(found) == {"planned_move": 4.0}


def test_a_finding_moves_the_rank_before_its_host_fails() -> None:
    """By the policy drain_degraded."""
    found = played(RecoveryMethod.WARM, 1, fault(2 * HOUR, warned=Warned.FINDING))

    assert lost_s(found) == {"planned_move": 2.0}


def test_the_circuit_breaker_stops_moves_when_half_of_the_hosts_ail() -> None:
    """The policies move no rank then; each host that fails costs a failover."""
    faults = [fault(2 * HOUR, n, 0.1, warned=Warned.FINDING) for n in range(4)]
    found = played(RecoveryMethod.WARM, 4, *faults)

    assert found.counts["failover"] == 3
    assert found.counts["planned_move"] == 1


def test_moves_go_on_once_an_operator_has_closed_the_circuit_breaker() -> None:
    """After an hour, in which nothing else happens."""
    faults = [
        fault(8 * HOUR, n, warned=Warned.FINDING, notice_s=6 * HOUR - 90 * n) for n in range(4)
    ]
    found = played(RecoveryMethod.WARM, 4, *faults)

    assert found.counts == {"planned_move": 4}


def test_a_worker_that_ends_alone_comes_back_as_a_standby() -> None:
    found = played(RecoveryMethod.WARM, 0, fault(AT, scope=FaultScope.WORKER))

    assert lost_s(found) == {"interrupted_step": 4.0, "failover": 20.0, "hold": COSTS.rejoin_s}


def test_a_worker_that_starts_with_all_others_is_not_started_again() -> None:
    """It ended alone, and the job restarts before it is back: the next loss is a usual one."""
    faults = (
        fault(AT, scope=FaultScope.WORKER),
        fault(AT + 50, scope=FaultScope.JOB),
        fault(5004.0),
    )
    found = lost_s(played(RecoveryMethod.WARM, 2, *faults))

    assert found["restart"] == 400.0
    assert found["failover"] == 40.0
    assert "hold" not in found


@pytest.mark.parametrize("method", list(RecoveryMethod))
def test_a_bug_in_the_script_restarts_the_job_with_every_method(method: RecoveryMethod) -> None:
    found = played(method, 1, fault(AT, scope=FaultScope.JOB))

    assert lost_s(found) == {"repeated_steps": AT, "restart": 400.0}


def test_an_elastic_job_trains_slower_until_the_next_host_has_started() -> None:
    found = lost_s(played(RecoveryMethod.ELASTIC, 1, fault(AT)))

    assert found["interrupted_step"] == 4.0
    assert found["resize"] == 2 * COSTS.resize_s
    # A quarter of the replicas is missing from the loss until the spare has started.
    assert found["shrunk"] == pytest.approx((COSTS.restart_s - COSTS.resize_s) / 4)


def test_an_elastic_job_without_a_whole_replica_restarts() -> None:
    found = lost_s(played(RecoveryMethod.ELASTIC, 1, fault(AT), asked=study(replica_hosts=4)))

    assert found == {"repeated_steps": AT, "restart": 400.0}


# --- an elastic job whose replicas have two hosts -------------------------------------------------

LATER = AT + 1000.0


def elastic(*faults: Fault, hosts: int = 4, spares: int = 0) -> dict[str, float]:
    """What it loses in 100 hours."""
    asked = study(hosts, replica_hosts=2)
    return lost_s(played(RecoveryMethod.ELASTIC, spares, *faults, asked=asked))


@pytest.mark.parametrize("hosts", [4, 6])
def test_healthy_hosts_of_broken_replicas_make_a_whole_one(hosts: int) -> None:
    """One replica less trains for all of the time but the resizes."""
    found = elastic(fault(AT, 0), fault(LATER, 3), hosts=hosts)

    resized = 2 * COSTS.resize_s
    shrunk = (100 * HOUR - AT - resized) / (hosts / 2)
    assert set(found) == {"interrupted_step", "resize", "shrunk"}
    assert found["resize"] == resized
    assert found["shrunk"] == pytest.approx(shrunk)


def test_the_part_of_the_state_that_no_host_has_left_is_lost_but_nobody_is_waited_for() -> None:
    """The hosts at places 0 and 2 had the first half of the state."""
    found = elastic(fault(AT, 0), fault(LATER, 2))

    repeated = LATER - AT - COSTS.resize_s
    assert found["repeated_steps"] == pytest.approx(AT - 4.0 + repeated / 2)
    assert found["restart"] == COSTS.restart_s
    assert "hold" not in found


def test_a_host_that_leaves_with_a_warning_hands_its_part_of_the_state_on() -> None:
    found = elastic(fault(AT, 0), fault(LATER, 2, warned=Warned.DRAIN))

    assert found["planned_move"] == COSTS.resize_s
    assert "repeated_steps" not in found
    assert "restart" not in found


def test_the_loss_of_a_host_that_did_not_train_stops_nothing() -> None:
    """Its replica was broken before."""
    one, both = elastic(fault(AT, 0)), elastic(fault(AT, 0), fault(LATER, 1))

    assert both == one
    assert one["resize"] == COSTS.resize_s


def test_the_loss_of_a_host_that_did_not_train_begins_no_restart_anew() -> None:
    bug = fault(LATER, scope=FaultScope.JOB)
    one = elastic(fault(AT, 0), bug)
    both = elastic(fault(AT, 0), bug, fault(LATER + COSTS.restart_s / 2, 1))

    assert both == one
    assert one["restart"] == COSTS.restart_s


def test_a_spare_and_a_host_of_a_broken_replica_make_a_whole_one() -> None:
    """The spare starts for the place of the first loss, whose replica is then taken apart."""
    found = elastic(fault(AT, 0), fault(AT + 100.0, 3), hosts=4, spares=2)

    assert "repeated_steps" not in found
    # Each loss, and the second spare: the first one alone makes no replica whole.
    assert found["resize"] == 3 * COSTS.resize_s


# --- whatever happens -----------------------------------------------------------------------------

FAULTS = st.lists(
    st.builds(
        fault,
        at_s=st.floats(0, 20 * HOUR),
        place=st.integers(0, 6),
        repair_h=st.floats(0, 5),
        scope=st.sampled_from(FaultScope),
    )
    | st.builds(
        fault,
        at_s=st.floats(0, 20 * HOUR),
        place=st.integers(0, 6),
        repair_h=st.floats(0, 5),
        warned=st.sampled_from(Warned),
        notice_s=st.floats(0, HOUR),
    ),
    max_size=12,
).map(lambda found: tuple(sorted(found, key=lambda f: f.at_s)))


@settings(deadline=None, max_examples=40)
@given(
    trace=FAULTS,
    setup=st.builds(RecoverySetup, st.sampled_from(RecoveryMethod), st.integers(0, 3)),
    replica_hosts=st.sampled_from([1, 2, 4]),
    checkpoint_s=st.sampled_from([0.0, 700.0]),
)
def test_useful_and_lost_time_are_the_whole_time(
    trace: tuple[Fault, ...], setup: RecoverySetup, replica_hosts: int, checkpoint_s: float
) -> None:
    costs = structs.replace(COSTS, save_s=30.0, snapshot_s=1.0, hot_share=0.01)
    asked = study(replica_hosts=replica_hosts, hours=20.0, costs=costs, checkpoint_s=checkpoint_s)
    found = outcome(asked, trace, setup)

    assert 0.0 <= found.goodput <= 1.0
    assert all(hours >= 0.0 for hours in found.lost.values())
    assert found.useful + sum(found.lost.values()) == pytest.approx(20.0)
    assert outcome(asked, trace, setup) == found


@settings(deadline=None, max_examples=30)
@given(
    trace=FAULTS.map(lambda found: tuple(f for f in found if f.warned is Warned.NOT)),
    method=st.sampled_from([RecoveryMethod.RESTART, RecoveryMethod.WARM]),
)
def test_one_more_standby_never_loses_more(
    trace: tuple[Fault, ...], method: RecoveryMethod
) -> None:
    """If it is free, and beyond the faults that strike only with it: a job that held met none."""
    asked = study(hours=20.0)
    useful = [outcome(asked, trace, RecoverySetup(method, n)).useful for n in range(4)]

    assert all(more >= fewer - ROUNDING_H for fewer, more in pairwise(useful))
