"""The comparison of the demo: strict, but for the line that a dying worker could not write."""

import json
from pathlib import Path
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
from tmd.core.values.snapshots import Rollback
from tmd.demo.report import DemoEvent, DemoTrace, compare, events_of, read_trace

OLD, NEW = 1, 2
"""Epochs."""


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
    new = Membership(NEW, members)
    return [msgspec.structs.replace(plan, resume=resume, moves=(move,), new=new)]


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


def written(folder: Path, *more: tuple[str, int, float, str]) -> DemoTrace:
    """As :func:`trace`, but by files of a host each; w1 has lost rank 1 to z1 after step 1.

    ``more``: further commits of rank 1 in step 2: worker, epoch, time and loss.
    """
    lines: list[tuple[str, int, int, int, float, str]]
    lines = [("w0", 0, s, 1 if s < 2 else 2, s, f"loss 0 {s}") for s in range(3)]
    lines += [("w1" if s < 2 else "z1", 1, s, 1 + s // 2, s, f"loss 1 {s}") for s in range(3)]
    lines += [(worker, 1, 2, epoch, at, loss) for worker, epoch, at, loss in more]
    for worker, rank, step, epoch, at, loss in lines:
        line = {"worker": worker, "rank": rank, "step": step, "epoch": epoch, "at": at}
        with (folder / f"{worker}.jsonl").open("a") as file:
            file.write(json.dumps({**line, "loss": loss}) + "\n")
    return read_trace(folder)


def test_each_commit_of_a_step_is_compared(tmp_path: Path) -> None:
    """Also one of a worker that was replaced, whose file comes before that of the other."""
    found = compare(written(tmp_path, ("w1", 1, 1.9, "x")), trace(), lost_before(2))

    assert found.difference == "1 losses differ, the first is of rank 1 in step 2"


@pytest.mark.parametrize(
    ("worker", "at", "resume"),
    [("w1", 1.9, 1), ("w1", 1.9, 3), ("w1", 2.1, 2), ("w0", 1.9, 2)],
    ids=["before the resume step", "after it", "after its replacement", "alive"],
)
def test_a_second_commit_of_a_step_is_a_difference(
    worker: str, at: float, resume: int, tmp_path: Path
) -> None:
    """Though its loss is the same."""
    run = written(tmp_path, (worker, 1, at, "loss 1 2"))

    assert compare(run, trace(), lost_before(resume)).difference == (
        f"rank 1 committed step 2 twice, as {worker} in epoch 1 and as z1 in epoch 2, and no plan "
        "says why"
    )


def test_a_rollback_explains_a_second_commit(tmp_path: Path) -> None:
    """Of each step that it returned behind, whoever committed it before."""
    run = written(tmp_path, ("w1", 1, 1.9, "loss 1 2"))
    (lost,) = lost_before(1)
    back = msgspec.structs.replace(lost, rollback=Rollback(1, 2))
    later = msgspec.structs.replace(back, rollback=Rollback(3, 0), resume=3)

    assert compare(run, trace(), [back]).difference == ""
    assert "twice" in compare(run, trace(), [later]).difference


def test_a_commit_of_which_no_survivor_knew_is_lawful(tmp_path: Path) -> None:
    """The rank died right after the vote, whose outcome reached nobody: the step is repeated."""
    run = written(tmp_path, ("w1", 1, 1.9, "loss 1 2"))

    assert compare(run, trace(), lost_before(2)).difference == ""


def test_of_several_commits_the_last_one_counts(tmp_path: Path) -> None:
    """That of the newest epoch, in whatever file it is."""
    found = written(tmp_path, ("z2", 1, 1.9, "x"))

    assert found.commits[1, 2]["worker"] == "z1"
    assert [line["worker"] for line in found.earlier] == ["z2"]
    assert written(tmp_path, ("w2", 3, 2.9, "y")).commits[1, 2]["worker"] == "w2"


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
