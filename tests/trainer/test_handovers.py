"""What a script does when its rank has moved away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.standalone import Voting
from tests.trainer.workers import Worker, worker
from tmd.core.planning.directives import Hold, Leave, Wait
from tmd.core.values.model import Activity
from tmd.trainer import Session


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


def test_all_functions_are_called_although_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    """The worker is a standby then, and still useful."""
    hooks, called = Voting(), []
    session = Session(hooks)

    def fail() -> None:
        raise OSError("no space left")

    session.on_handover(lambda: called.append("first"))
    session.on_handover(fail)
    session.on_handover(lambda: called.append("last"))
    reported: list[str] = []
    hooks.handovers.run(reported.append)
    hooks.handovers.run(reported.append)

    assert called == ["first", "last"] * 2
    assert reported == ["runs the functions of session.on_handover", ""] * 2
    assert "a function of session.on_handover failed" in caplog.text
    assert "no space left" in caplog.text


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Worker]:
    """A worker whose rank 2 a plan has given to another one."""
    with worker(tmp_path, activity=Activity.LEFT, rank=2, epoch=1, step=5, plan="p") as made:
        yield made


def statuses_at(left: Worker) -> list[tuple[Activity, int | None, str]]:
    """Filled with what the worker reports while the functions run."""
    seen: list[tuple[Activity, int | None, str]] = []
    left.handovers.add(
        lambda: seen.append((left.status.activity, left.status.rank, left.status.detail))
    )
    return seen


AS_A_RANK = (Activity.LEFT, 2, "runs the functions of session.on_handover")


def test_they_run_before_the_worker_says_that_it_stands_by(left: Worker) -> None:
    """Its host may be switched off as soon as it says so."""
    seen = statuses_at(left)
    left.obey(Wait())
    left.parts.act(Activity.LEFT)

    assert seen == [AS_A_RANK]
    assert (left.status.activity, left.status.rank, left.status.detail) == (
        Activity.STANDBY,
        None,
        "",
    )


def test_they_run_before_a_worker_exits_with_its_move(left: Worker) -> None:
    seen = statuses_at(left)
    left.obey(Leave())
    with pytest.raises(SystemExit):
        left.parts.act(Activity.LEFT)

    assert seen == [AS_A_RANK]


def test_they_do_not_run_while_the_rank_may_come_back(left: Worker) -> None:
    """Another rank was lost in the switch. The leader may still count on the state of this one, so
    nothing keeps this worker from what it is told."""
    seen = statuses_at(left)
    left.obey(Hold("q", 2))
    left.parts.act(Activity.LEFT)
    assert (seen, left.status.activity) == ([], Activity.STUCK)
    left.obey(Wait())
    left.parts.act(Activity.STUCK)

    assert [(activity, rank) for activity, rank, _ in seen] == [(Activity.STANDBY, None)]
    assert left.status.detail == ""


@pytest.mark.parametrize(("code", "times"), [(0, 1), (1, 0)])
def test_they_run_before_a_halted_worker_exits_unless_the_job_has_failed(
    left: Worker, code: int, times: int
) -> None:
    seen = statuses_at(left)
    left.obey(Hold("q", 2))
    left.parts.act(Activity.LEFT)
    left.obey(Leave(code))
    with pytest.raises(SystemExit):
        left.parts.act(Activity.STUCK)

    assert len(seen) == times
    assert left.status.detail == ""


def test_a_standby_hands_nothing_over(tmp_path: Path) -> None:
    with worker(tmp_path) as made:
        seen = statuses_at(made)
        made.parts.migration.to_pool()

    assert seen == []
