"""A disturbed run against the undisturbed one."""

from msgspec import structs

from tests.campaign.values import observed, plan
from tmd.campaign.oracle import JobRun, differences, repeated
from tmd.core.values.snapshots import Rollback
from tmd.demo.report import DemoTrace


def run(losses: dict[tuple[int, int], str], weights: str = "w", undone=()) -> JobRun:
    commits = {
        key: {"loss": loss, "epoch": 1, "at": 0.0, "worker": "w"} for key, loss in losses.items()
    }
    return JobRun(DemoTrace(commits, tuple(undone)), {"0": weights})


GOLDEN = run({(0, 0): "a", (0, 1): "b", (0, 2): "c"})
SEEN = (observed(scenario="early", steps=(0, 1)), observed(scenario="late", steps=(2, 3)))


def test_the_same_numbers_are_no_difference() -> None:
    """Losses and weights."""
    assert differences(GOLDEN, GOLDEN, (), SEEN, whole=True) == []


def test_a_loss_that_differs_is_told_with_the_scenario_before_it() -> None:
    """So is one in a run that ended early."""
    other = run({(0, 0): "a", (0, 1): "b", (0, 2): "x"})

    for whole in (True, False):
        (said, *_) = differences(other, GOLDEN, (), SEEN, whole=whole)
        assert "after scenario 'late'" in said


def test_a_scenario_that_was_not_played_is_not_blamed() -> None:
    """It was skipped, or its cluster had ended before it began."""
    other = run({(0, 0): "a", (0, 1): "b", (0, 2): "x"})
    unplayed = observed(scenario="unplayed", trouble="all daemons have ended")

    (said,) = differences(other, GOLDEN, (), (*SEEN, unplayed), whole=False)
    assert said == "1 losses differ, after scenario 'late'"


def test_each_commit_of_a_step_is_compared() -> None:
    """A worker that was replaced has committed it, too; or the same worker, without a rollback."""
    for loss, said in (("x", "1 losses differ"), ("c", "rank 0 committed step 2 twice")):
        line = {"rank": 0, "step": 2, "worker": "w", "epoch": 1, "at": 0.0, "loss": loss}
        trace = structs.replace(GOLDEN.trace, earlier=(line,))
        other = structs.replace(GOLDEN, trace=trace)
        for whole in (True, False):
            (found, *_) = differences(other, GOLDEN, (), SEEN, whole=whole)
            assert found.startswith(said)
            assert found.endswith(", after scenario 'late'")


def test_a_run_that_ended_early_lacks_nothing() -> None:
    """But a whole one does."""
    short = run({(0, 0): "a"})

    assert differences(short, GOLDEN, (), SEEN, whole=False) == []
    assert "wrote no line for step 1" in differences(short, GOLDEN, (), SEEN, whole=True)[0]


def test_weights_that_differ_are_told() -> None:
    """Also of a standby that lived a rank's life to the end."""
    other = run({(0, 0): "a", (0, 1): "b", (0, 2): "c"}, weights="v")

    assert differences(other, GOLDEN, (), SEEN, whole=True) == [
        "the final weights of ranks 0 differ"
    ]


def test_a_step_that_a_dead_rank_did_not_write_down_is_no_difference() -> None:
    """It was killed between its commit and its line."""
    lost = structs.replace(plan("failover done", 0), resume=2)
    unwritten = run({(0, 0): "a", (0, 2): "c"})

    assert differences(unwritten, GOLDEN, (lost,), SEEN, whole=True) == []


def test_repeated_steps_are_counted_between_two_moments_and_by_rank() -> None:
    """The rank that ran most of them again. Some are repeated in the epoch that follows a loss."""
    undone = [{"undone": s, "rank": r, "epoch": e} for s, r, e in [(4, 0, 1), (5, 0, 2), (5, 1, 2)]]
    trace = run({}, undone=undone).trace

    assert repeated(trace, (1, 2), (4, 5)) == 1
    assert repeated(trace, (1, 2), (4, 6)) == 2
    assert repeated(trace, (1, 3), (4, 5)) == 2
    assert repeated(trace, (2, 3), (7, 9)) == 0
    assert repeated(trace, (3, 4), (7, 9)) == 0


def test_steps_that_a_rollback_repeats_are_counted_with_the_broken_one() -> None:
    """They were committed before, so that none of them was undone."""
    trace = run({}, undone=[{"undone": 5, "rank": 0, "epoch": 1}]).trace
    lost = plan("failover done", 0)
    back = structs.replace(lost, rollback=Rollback(2, repeats=3))

    assert repeated(trace, (1, 2), (4, 6), [lost]) == 1
    assert repeated(trace, (1, 2), (4, 6), [lost, back]) == 4
