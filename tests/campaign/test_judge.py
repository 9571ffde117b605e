"""What was expected against what was seen."""

import pytest
from msgspec import structs

from tests.campaign.values import observed, plan
from tmd.campaign.judge import deviations, late_decisions
from tmd.campaign.scenario import Expected, FaultPart, Scenario
from tmd.core.values.model import Mark, Phase

ONE = FaultPart(kind="process.kill", where="rank 1")
LOSS = Expected(plans=("failover done",), moved=(1,), alerts=("trainer.exited",))


def scenario(expect: Expected = LOSS, *faults: FaultPart) -> Scenario:
    return Scenario(name="one", faults=faults or (ONE,), expect=expect)


def test_what_is_as_expected_is_no_deviation() -> None:
    """Plan, rank and alert."""
    seen = observed(plan("failover done", 1), codes=("trainer.exited",), repeated=1)

    assert deviations(scenario(), seen) == []


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (observed(codes=("trainer.exited",)), "plans: none instead of failover done"),
        (observed(plan("failover done", 2), codes=("trainer.exited",)), "ranks moved: [2]"),
        (observed(plan("failover done", 1)), "alerts that were not raised: trainer.exited"),
        (
            observed(plan("failover done", 1), codes=("trainer.exited", "nic.down")),
            "unexpected alerts: nic.down of host: so it is",
        ),
        (
            observed(plan("failover done", 1), codes=("trainer.exited",), repeated=2),
            "2 steps were run again, at most 1 may be",
        ),
        (
            observed(plan("failover done", 1), codes=("trainer.exited",), fired=()),
            "1 of 1 faults did not fire",
        ),
        (
            observed(plan("failover done", 1), codes=("trainer.exited",), trouble="in vain"),
            "in vain",
        ),
    ],
)
def test_each_deviation_is_a_sentence(seen, said: str) -> None:
    """A fault that did not fire is one, and no pass."""
    found = deviations(scenario(), seen)

    assert any(said in text for text in found)


def test_plans_that_may_come_are_no_deviation_and_others_are() -> None:
    """In any number, between those that must come in their order."""
    expect = Expected(plans=("failover done",), may=("planned aborted", "planned done"))
    plans = [plan("planned aborted", 1), plan("failover done", 1), plan("planned done", 1)]

    assert deviations(scenario(expect), observed(*plans)) == []
    assert deviations(scenario(expect), observed(*plans, plan("failover aborted", 1)))
    assert deviations(scenario(expect), observed(plans[0]))


def test_a_dropped_move_that_had_been_voted_is_judged_by_what_was_written_for_that() -> None:
    """And one that had not is not excused by it: its phases say which it is."""
    quiet = Expected(plans=("planned aborted", "planned done"), repeated=0)
    voted = Expected(plans=("planned aborted", "failover done", "planned done"), repeated=1)
    both = structs.replace(scenario(quiet), voted=voted)
    dropped, back, again = (
        plan(what, 1) for what in ("planned aborted", "failover done", "planned done")
    )
    switched = structs.replace(
        dropped, timeline=(Mark(Phase.SWITCH, 1.0), Mark(Phase.ABORTED, 2.0))
    )

    assert deviations(both, observed(dropped, again)) == []
    assert deviations(both, observed(switched, back, again, repeated=1)) == []
    assert deviations(both, observed(switched, again))
    assert deviations(both, observed(dropped, back, again, repeated=1))
    assert deviations(both, observed(dropped, again, repeated=1))


def test_words_of_an_outcome() -> None:
    """Why a plan was dropped is part of what is expected."""
    expect = Expected(plans=("planned aborted",), outcome="other bits")
    refused = plan("planned aborted", 1, outcome="s1 computes other bits than rank 1")

    assert deviations(scenario(expect), observed(refused)) == []
    assert deviations(scenario(expect), observed(plan("planned aborted", 1)))


def test_what_was_skipped_is_not_judged() -> None:
    """It is told by name instead."""
    assert deviations(scenario(), observed(skipped="needs root")) == []


@pytest.mark.parametrize(("at", "late"), [(10.0, False), (16.0, True)])
def test_decisions_are_judged_by_the_median_of_all_repeats(at: float, late: bool) -> None:
    """A lease of 3 s: 4.5 s are allowed after the fault at 9 s."""
    expect = Expected(plans=("failover done",), decided_within_leases=1.5)
    runs = [observed(plan("failover done", 1, at=t)) for t in (9.5, at, at, 30.0)]

    assert bool(late_decisions(scenario(expect), runs[:3], 3.0)) is late
