"""The comparison of the demo: strict, but for the line that a dying worker could not write."""

from typing import Any

import msgspec
import pytest

from tests.values import failover
from tmd.core.model import (
    JobRecord,
    JobState,
    Mark,
    Member,
    Membership,
    MigrationPlan,
    Move,
    Phase,
)
from tmd.demo.report import Trace, compare, events_of


def trace(**changed: Any) -> Trace:
    """Two ranks, three steps; ``changed`` is loss by ``r<rank>s<step>``, ``None`` for no line."""
    commits = {}
    for rank in range(2):
        for step in range(3):
            loss = changed.get(f"r{rank}s{step}", f"loss {rank} {step}")
            if loss is not None:
                commits[rank, step] = {"loss": loss}
    return Trace(commits, ())


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

    assert found.difference == "2 losses differ, first that of rank 1 in step 1"


def test_only_the_last_line_of_a_lost_rank_may_be_missing() -> None:
    """Its commit was its last act; all its other lines, and those of others, must be there."""
    missing = trace(r1s1=None)

    assert compare(missing, trace(), lost_before(2)).difference == ""
    assert compare(missing, trace(), lost_before(2)).unwritten == 1
    for plans in ([], lost_before(1), lost_before(3)):
        assert compare(missing, trace(), plans).difference == "rank 1 never wrote down step 1"
    other = compare(trace(r0s1=None), trace(), lost_before(2))
    assert other.difference == "rank 0 never wrote down step 1"


def test_a_line_too_many_is_a_difference() -> None:
    golden = Trace({k: v for k, v in trace().commits.items() if k != (1, 2)}, ())

    assert "first that of rank 1 in step 2" in compare(trace(), golden, []).difference


@pytest.mark.parametrize(
    ("broken", "committed", "expected"),
    [((13.0, 16.0), 12.0, 0.5), ((), 12.0, 4.5), ((), 14.0, 2.5)],
    ids=["in the midst of a step", "between two", "after the vote"],
)
def test_a_standstill_lies_between_a_broken_step_and_the_same_once_more(
    broken: tuple[float, ...], committed: float, expected: float
) -> None:
    """The one that is last at each end counts; with no step under way it begins with the fault."""
    (plan,) = lost_before(2)
    plan = msgspec.structs.replace(
        plan,
        phase=Phase.DONE,
        new=Membership(2, plan.old.members),
        timeline=tuple(Mark(p, 12.5) for p in (Phase.RECOVER, Phase.SYNC)),
    )
    line = {"links_opened": 3, "rss_peak": 0, "loss": ""}
    commits = {
        (rank, step): {**line, "epoch": epoch, "step": step, "began": began + rank / 10, "at": at}
        for rank in range(2)
        for step, epoch, began, at in [(0, 1, 10, 11), (1, 1, 11, committed), (2, 2, 16.4, 17.5)]
    }
    # Another loss, later.
    undone = [{"undone": 2, "rank": 0, "epoch": 1, "at": at} for at in broken]
    undone.append({"undone": 3, "rank": 0, "epoch": 2, "at": 20.0})
    (event,) = events_of(Trace(commits, tuple(undone)), [plan], {plan.id: 12.0}, {})

    assert event.standstill_s == pytest.approx(expected)
