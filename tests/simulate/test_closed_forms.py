"""The simulation agrees with the formulas that exist."""

from __future__ import annotations

import math

import pytest
from msgspec import structs

from tests.simulate.studies import FREE, study
from tmd.simulate.advice import checkpoint_every_s
from tmd.simulate.compare import outcome
from tmd.simulate.failures import Component, FaultAssumptions, Table, drawn
from tmd.simulate.values import Cause, FaultScope, Job, RecoveryMethod, RecoverySetup

HOUR = 3600.0


def restart_goodput(every_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Goodput of a job that restarts from checkpoints, where faults come at random at any time.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
    Future Generation Computer Systems 22(3), 2006: the complete solution.
    """
    wall = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((every_s + save_s) / mtbf_s)
    return every_s / wall


def availability(hosts: int, standbys: int, mtbf_h: float, repair_h: float) -> float:
    """Share of the time in which at least ``hosts`` of all hosts work.

    Each host fails and is repaired independently of the others, so that the number of working ones
    has a binomial distribution, whatever the distribution of repair times.
    """
    works, whole = mtbf_h / (mtbf_h + repair_h), hosts + standbys
    return math.fsum(
        math.comb(whole, n) * works**n * (1.0 - works) ** (whole - n)
        for n in range(hosts, whole + 1)
    )


def table(mtbf_h: float) -> Table:
    """One component that takes down a host after ``mtbf_h`` hours on average."""
    return Table("made up", 1, mtbf_h / 24, (Component("c", 1, FaultScope.HOST),))


@pytest.mark.parametrize("every_s", [600.0, 2000.0, 9000.0])
def test_restarting_has_the_goodput_of_dalys_complete_solution(every_s: float) -> None:
    """Faults at any time, also while the job restarts, and hosts that are back at once."""
    costs = structs.replace(FREE, restart_s=300.0, save_s=120.0)
    asked = study(1, hours=60_000.0, costs=costs, checkpoint_s=every_s)
    trace = drawn(table(3.0), asked.job, 0, FaultAssumptions(repair_h=0.0), seed=1)
    found = outcome(asked, trace, RecoverySetup(RecoveryMethod.RESTART, 0))

    expected = restart_goodput(every_s, 120.0, 300.0, 3.0 * HOUR)
    assert found.goodput == pytest.approx(expected, rel=0.01)


def test_no_interval_between_checkpoints_is_much_better_than_youngs() -> None:
    best = checkpoint_every_s(120.0, 30 * HOUR)
    others = [restart_goodput(best * f, 120.0, 300.0, 30 * HOUR) for f in (0.25, 0.5, 2.0, 4.0)]

    assert restart_goodput(best, 120.0, 300.0, 30 * HOUR) >= max(others) - 1e-3
    assert checkpoint_every_s(0.0, HOUR) == checkpoint_every_s(120.0, float("inf")) == 0.0


@pytest.mark.parametrize(("hosts", "standbys"), [(1, 0), (4, 0), (4, 1), (4, 3)])
def test_a_job_holds_as_long_as_too_few_hosts_work(hosts: int, standbys: int) -> None:
    """Hosts that fail and are repaired independently of each other."""
    asked = study(hosts, hours=100_000.0, costs=FREE)
    trace = drawn(table(100.0), asked.job, standbys, FaultAssumptions(repair_h=25.0), seed=2)
    found = outcome(asked, trace, RecoverySetup(RecoveryMethod.RESTART, standbys))

    expected = availability(hosts, standbys, 100.0, 25.0)
    assert 1.0 - found.lost.get(Cause.HOLD, 0.0) / found.hours == pytest.approx(expected, abs=0.02)


def test_the_real_planner_holds_as_long_as_the_model_of_spares() -> None:
    """Standbys of tmd and spare hosts are the same hosts."""
    asked = study(4, hours=500.0, costs=FREE)
    trace = drawn(table(50.0), Job(4, hours=500.0), 1, FaultAssumptions(repair_h=20.0), seed=3)
    holds = [
        outcome(asked, trace, RecoverySetup(k, 1)).lost[Cause.HOLD]
        for k in (RecoveryMethod.RESTART, RecoveryMethod.WARM)
    ]

    assert holds[0] > 10
    assert holds[1] == pytest.approx(holds[0])
