"""The comparison of the demo: strict, but for the line that a dying worker could not write."""

from typing import Any

import msgspec
import pytest

from tests.values import failover
from tmd.core.values.model import (
    JobRecord,
    JobState,
    Mark,
    Member,
    Membership,
    MigrationPlan,
    Move,
    Phase,
)
from tmd.demo.report import DemoEvent, DemoTrace, compare, events_of


def trace(**changed: Any) -> DemoTrace:
    """Two ranks, three steps; ``changed`` is loss by ``r<rank>s<step>``, ``None`` for no line."""
    commits = {}
    for rank in range(2):
        for step in range(3):
            loss = changed.get(f"r{rank}s{step}", f"loss {rank} {step}")
            if loss is not None:
                commits[rank, step] = {"loss": loss}
    return DemoTrace(commits, ())


def lost_before(resume: int) -> list[MigrationPlan]:
    """A failover of rank 1 that resumes with step ``resume``."""
    members = tuple(Member(worker=f"w{i}", host=f"h{i}", address="") for i in range(2))
    record = JobRecord("job", 2, JobState.RUNNING, Membership(1, members), 1)
    plan = failover(record, "w1")
    move = Move(rank=1, leaver=members[1])
    return [msgspec.structs.replace(plan, resume=resume, moves=(move,))]


def test_equal_runs_are_equal() -> None:
    found = compare(trace(), trace(), [])

    assert (found.steps, found.unwritten, found.difference) == (3, 0, "")


def test_a_loss_that_differs_is_named() -> None:
    found = compare(trace(r1s1="x", r0s2="y"), trace(), [])

    assert found.difference == "2 losses differ, the first is of rank 1 in step 1"


def test_only_the_last_line_of_a_lost_rank_may_be_missing() -> None:
    """Its commit was its last act; all its other lines, and those of others, must be there."""
    missing = trace(r1s1=None)

    assert compare(missing, trace(), lost_before(2)).difference == ""
    assert compare(missing, trace(), lost_before(2)).unwritten == 1
    for plans in ([], lost_before(1), lost_before(3)):
        assert compare(missing, trace(), plans).difference == "rank 1 wrote no line for step 1"
    other = compare(trace(r0s1=None), trace(), lost_before(2))
    assert other.difference == "rank 0 wrote no line for step 1"


def test_a_line_too_many_is_a_difference() -> None:
    golden = DemoTrace({k: v for k, v in trace().commits.items() if k != (1, 2)}, ())

    assert "the first is of rank 1 in step 2" in compare(trace(), golden, []).difference


OLD, NEW = 1, 2
"""Epochs."""


def lost_at(fault: float, known: float, settled: float, *lines: Any, **how: float) -> float | None:
    """For how long nobody had anything to compute."""
    return loss(fault, known, settled, *lines, **how).idle_s


def loss(
    fault: float,
    known: float,
    settled: float,
    *lines: tuple[int, int, int, float, float, float],
    proof: float = 0.0,
) -> DemoEvent:
    """What a loss costs by what each rank wrote of its steps: rank, step, epoch, began, computed
    and committed (0: undone); ``proof``: how long a vote waited."""
    (plan,) = lost_before(min(step for _, step, epoch, *_ in lines if epoch == NEW))
    marks = (Mark(Phase.RECOVER, known), Mark(Phase.SYNC, settled))
    new = Membership(NEW, plan.old.members)
    plan = msgspec.structs.replace(plan, phase=Phase.DONE, new=new, timeline=marks)
    plan = msgspec.structs.replace(plan, timings={"proof": proof} if proof else {})
    commits, undone = {}, []
    for rank, step, epoch, began, computed, at in lines:
        line = {"rank": rank, "epoch": epoch, "began": began, "computed": computed, "at": at}
        if at:
            commits[rank, step] = {**line, "links_opened": 3, "rss_peak": 0}
        else:
            undone.append({**line, "undone": step})
    (event,) = events_of(DemoTrace(commits, tuple(undone)), [plan], {plan.id: fault}, {})
    return event


def steps(*lines: tuple[int, int, int, float, float, float]) -> Any:
    """Step 0 of both ranks, and what else there is."""
    return (0, 0, OLD, 9.0, 9.9, 10.0), (1, 0, OLD, 9.0, 9.9, 10.0), *lines


def test_a_broken_step_is_computed_to_its_end() -> None:
    """The last of the survivors counts, and the last that begins anew; a later loss does not."""
    found = lost_at(
        *(12.0, 12.2, 16.1),
        *steps((0, 1, OLD, 10.0, 16.0, 0)),
        *((0, 1, NEW, 16.4, 17.0, 17.1), (1, 1, NEW, 16.5, 17.0, 17.1), (0, 2, NEW, 17.1, 20, 0)),
    )

    assert found == pytest.approx(0.2 + 0.5)


@pytest.mark.parametrize("epoch", [OLD, NEW])
def test_a_step_is_repeated_whether_or_not_it_is_given_up_in_the_new_epoch(epoch: int) -> None:
    found = loss(
        *(12.0, 12.2, 16.1),
        *steps((0, 1, epoch, 10.0, 16.0, 0)),
        *((0, 1, NEW, 16.4, 17.0, 17.1), (1, 1, NEW, 16.5, 17.0, 17.1), (0, 2, NEW, 17.1, 20, 0)),
    )

    assert found.repeated_steps == 1


def test_a_vote_that_waits_for_digests_holds_everybody_up() -> None:
    found = lost_at(
        *(12.0, 12.2, 16.1),
        *steps((0, 1, OLD, 10.0, 16.0, 0)),
        *((0, 1, NEW, 16.4, 17.0, 17.1), (1, 1, NEW, 16.5, 17.0, 17.1)),
        proof=0.4,
    )

    assert found == pytest.approx(0.2 + 0.5 + 0.4)


def test_who_had_come_to_its_vote_waits_there() -> None:
    """Its line is written once it knows that the step is to be repeated."""
    found = lost_at(
        *(12.0, 12.2, 16.1),
        *steps((0, 1, OLD, 10.0, 12.1, 0)),
        *((0, 1, NEW, 16.4, 17.0, 17.1), (1, 1, NEW, 16.3, 17.0, 17.1)),
    )

    assert found == pytest.approx(0.1 + 4.3)


def test_so_does_who_commits_it_after_all() -> None:
    found = lost_at(
        *(12.0, 12.2, 16.1),
        *steps((0, 1, OLD, 10.0, 12.1, 16.3), (1, 1, OLD, 10.0, 12.0, 12.0)),
        *((0, 2, NEW, 16.4, 17.0, 17.1), (1, 2, NEW, 16.4, 17.0, 17.1)),
    )

    assert found == pytest.approx(0.1 + 4.3)


def test_between_two_steps_nothing_is_counted_twice() -> None:
    found = lost_at(
        *(12.0, 12.2, 12.3),
        *steps((0, 1, OLD, 10.0, 11.0, 12.0), (1, 1, OLD, 10.0, 11.0, 12.0)),
        *((0, 2, NEW, 12.5, 13.0, 13.1), (1, 2, NEW, 12.4, 13.0, 13.1)),
    )

    assert found == pytest.approx(0.5)


def test_a_step_that_was_voted_before_is_carried_out() -> None:
    found = lost_at(
        *(12.0, 12.2, 14.3),
        *steps((0, 1, OLD, 10.0, 11.0, 14.0), (1, 1, OLD, 10.0, 11.0, 11.5)),
        *((0, 2, NEW, 14.5, 15.0, 15.1), (1, 2, NEW, 14.4, 15.0, 15.1)),
    )

    assert found == pytest.approx(0.2 + 0.5)


def test_a_rank_that_is_lost_again_says_nothing_of_the_first_loss() -> None:
    found = lost_at(
        *(12.0, 12.2, 14.3),
        *steps((0, 1, OLD, 10.0, 14.0, 0)),
        *((0, 1, NEW, 14.5, 15.0, 15.1), (1, 1, NEW + 1, 27.0, 28.0, 28.1)),
    )

    assert found is None
