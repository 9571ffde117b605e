"""What a standby is worth, and the sentences that say so."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from tests.simulate.studies import COSTS, fault, played, study
from tmd.core.values.errors import ConfigError
from tmd.simulate import chart
from tmd.simulate.advice import Price, mean, recommended, sentences, snapshot_steps
from tmd.simulate.compare import losses, outcome, setups
from tmd.simulate.values import (
    HOUR,
    FaultScope,
    Job,
    Outcome,
    RecoveryMethod,
    RecoverySetup,
    Warned,
)

PRICE = Price(gpu_hour=2.0, gpus=8)
JOB = Job(4, hours=100.0)


def useful(method: RecoveryMethod, standbys: int, hours: float) -> Outcome:
    return Outcome(
        RecoverySetup(method, standbys), 100.0, hours, {"hold": 100.0 - hours}, 3.0, {}, 600.0
    )


def advice(*found: Outcome, job: Job = JOB):
    return recommended(
        {one.setup: [one] for one in found}, job, PRICE, snapshot_steps(job, COSTS, HOUR)
    )


def test_a_standby_is_kept_as_long_as_it_gains_more_than_it_costs() -> None:
    """Four hosts for an hour cost 64; a standby for 100 h costs 1,600, as 25 h of the job."""
    found = advice(
        useful(RecoveryMethod.WARM, 0, 40.0),
        useful(RecoveryMethod.WARM, 1, 80.0),
        useful(RecoveryMethod.WARM, 2, 90.0),
    )

    assert found.best.setup == RecoverySetup(RecoveryMethod.WARM, 1)
    assert [o.gained_h for o in found.setups] == [0.0, 40.0, 10.0]
    assert [o.worth for o in found.setups] == [0.0, 40 * 64.0, 10 * 64.0]
    assert [o.price for o in found.setups] == [0.0, 1600.0, 1600.0]
    assert found.best.useful_hour == pytest.approx(5 * 1600.0 / 80.0)


def test_a_standby_that_gains_nothing_is_not_kept() -> None:
    found = advice(useful(RecoveryMethod.WARM, 0, 90.0), useful(RecoveryMethod.WARM, 1, 90.0))

    assert found.best.setup == RecoverySetup(RecoveryMethod.WARM, 0)
    assert next(iter(sentences(found, JOB, COSTS))) == "Keep no standby."


def test_of_two_equal_ways_the_standby_is_warm() -> None:
    """A hot one takes part of a rank's network. It is compared with no standby at all."""
    found = advice(
        useful(RecoveryMethod.WARM, 0, 40.0),
        useful(RecoveryMethod.HOT, 1, 80.0),
        useful(RecoveryMethod.WARM, 1, 80.0),
    )

    assert found.best.setup == RecoverySetup(RecoveryMethod.WARM, 1)
    assert [o.gained_h for o in found.setups] == [0.0, 40.0, 40.0]


def test_a_hot_standby_that_gains_more_is_chosen() -> None:
    found = advice(
        useful(RecoveryMethod.WARM, 0, 40.0),
        useful(RecoveryMethod.WARM, 1, 80.0),
        useful(RecoveryMethod.HOT, 1, 82.0),
    )
    lines = list(sentences(found, JOB, COSTS))

    assert lines[0] == "Keep 1 hot standby."
    assert "With warm standbys instead, the job would have 2.00 useful hours fewer." in lines


def test_rivals_are_compared_by_the_price_of_the_same_work() -> None:
    found = advice(
        useful(RecoveryMethod.WARM, 1, 80.0),
        useful(RecoveryMethod.RESTART, 1, 64.0),
        useful(RecoveryMethod.ELASTIC, 0, 80.0),
    )
    lines = " ".join(sentences(found, JOB, COSTS))

    assert "cheapest with 1 spare host: goodput 64.00%, and an hour costs 25.00% more." in lines
    assert "cheapest with no spare hosts: goodput 80.00%, and an hour costs 20.00% less." in lines


def test_the_advice_says_what_one_standby_more_would_bring() -> None:
    more = useful(RecoveryMethod.WARM, 2, 81.0)
    tried = advice(useful(RecoveryMethod.WARM, 0, 40.0), useful(RecoveryMethod.WARM, 1, 80.0), more)
    untried = advice(useful(RecoveryMethod.WARM, 0, 40.0), useful(RecoveryMethod.WARM, 1, 80.0))

    assert "One more would gain 1.00 h, worth 64, for 1,600." in sentences(tried, JOB, COSTS)
    assert any("more may be better still" in s for s in sentences(untried, JOB, COSTS))


def test_a_loss_that_something_warns_of_is_no_reason_to_save_the_state() -> None:
    """Its rank moves before. So is no loss of a standby, nor of the whole job."""
    lost = fault(HOUR, 0)
    drained = structs.replace(lost, warned=Warned.DRAIN)
    bug = structs.replace(lost, scope=FaultScope.JOB)

    assert losses([lost, drained, bug, fault(HOUR, place=JOB.hosts)], JOB) == 1


def test_a_unique_state_is_saved_as_often_as_loses_least() -> None:
    """The square root of twice 2 s times an hour is 120 s, which are 12 steps."""
    costs = structs.replace(COSTS, snapshot_s=2.0)
    alone = Job(4, replica_hosts=4, hours=100.0)

    assert snapshot_steps(alone, costs, HOUR) == 12
    assert snapshot_steps(JOB, costs, HOUR) == 0
    lines = list(
        sentences(
            advice(useful(RecoveryMethod.WARM, 0, 90.0), job=alone),
            alone,
            costs,
        )
    )
    assert any(s.startswith("Take a snapshot in memory every 10 steps") for s in lines)


def test_the_mean_of_outcomes_still_sums_up_to_the_whole() -> None:
    found = mean(
        [
            played(RecoveryMethod.WARM, 1, fault(1004.0)),
            played(RecoveryMethod.WARM, 1, fault(500.0)),
        ]
    )

    assert found.useful + sum(found.lost.values()) == pytest.approx(100.0)
    assert found.counts == {"failover": 1.0}


def test_the_chart_has_a_bar_for_each_way_and_a_part_for_each_cause(tmp_path: Path) -> None:
    found = [outcome(study(), (fault(1004.0),), setup) for setup in setups(list(RecoveryMethod), 1)]
    file = tmp_path / "lost.svg"
    chart.write(file, found)
    drawn = file.read_text()

    for one in found:
        assert f">{one.setup.name}</text>" in drawn
    parts = sum(len(one.lost) for one in found)
    assert drawn.count("<title>") == parts + 1


@pytest.mark.parametrize("name", ["lost.png", "no/folder/lost.svg"])
def test_a_chart_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(ConfigError, match="lost"):
        chart.check(tmp_path / name)
