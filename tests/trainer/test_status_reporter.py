"""A worker's report between two steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.fabric.circle import member, sync
from tests.trainer.workers import reporting
from tmd.core.values.errors import IllegalTransition
from tmd.core.values.model import Activity, Membership, Rehearsal
from tmd.core.worker.transitions import TABLE, WorkerTransition
from tmd.fabric import Group
from tmd.testing.clients import worker_status
from tmd.trainer.state.roles import Role, Roles
from tmd.trainer.worker.status_reporter import StatusReporter


class Clock:
    """The monotonic clock, which a test moves on."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    return clock


@pytest.fixture
def reporter(tmp_path: Path) -> Iterator[StatusReporter]:
    with reporting(tmp_path, worker_status("h1/job/0.a")) as (made, _, _):
        yield made


def test_the_time_without_progress_counts_from_the_latest_commit(
    clock: Clock, reporter: StatusReporter
) -> None:
    reporter.update(WorkerTransition.ENTERED, step=1)
    clock.now += 5.0
    stood = reporter.current().stands_s
    reporter.update(loss=0.5)
    unmoved = reporter.current().stands_s
    reporter.update(step=2)

    assert (stood, unmoved, reporter.current().stands_s) == (5.0, 5.0, 0.0)


def test_a_broken_step_is_no_progress(clock: Clock, reporter: StatusReporter) -> None:
    """The time since the latest commit goes on: the leader counts it as lost."""
    reporter.update(WorkerTransition.ENTERED, step=1)
    clock.now += 5.0
    reporter.update(WorkerTransition.HALTED)
    clock.now += 2.0

    assert reporter.current().stands_s == 7.0


def test_a_standby_has_no_time_without_progress(clock: Clock, reporter: StatusReporter) -> None:
    reporter.update(WorkerTransition.STOOD_BY)
    clock.now += 5.0

    assert reporter.current().stands_s == 0.0


def test_a_worker_reports_the_role_of_the_rank_that_it_holds(reporter: StatusReporter) -> None:
    """And nothing of a rank that it only might be."""
    roles = Roles(several=True)
    reporter.registered((), [], (1,), roles)
    reporter.update(WorkerTransition.ENTERED, rank=1)
    unheard = reporter.status.role
    roles.known = (Role("first", (0,)), Role("last", (1,)))
    reporter.update(step=1)
    held = reporter.status.role
    reporter.update(WorkerTransition.STOOD_BY, rank=None)

    assert (unheard, held, reporter.status.role) == ("", "last", "")


def test_the_latest_verdict_on_each_role_is_reported(reporter: StatusReporter) -> None:
    """By the roles that were heard last; on those that are no more there is none."""
    roles = Roles(several=True)
    reporter.registered((), [], (1,), roles)
    roles.known = (Role("first", (0,)), Role("last", (1,)))
    for step, rank in ((5, 1), (7, 0), (9, 1)):
        reporter.report_rehearsal(rank, Rehearsal(step, 1.0))
    told = [(v.role, v.ranks, v.step) for v in reporter.status.rehearsed]
    reporter.report_rehearsal(
        1, Rehearsal(0, 0.0, "other shapes"), (roles.known[0], Role("new", (1,)))
    )

    assert told == [("first", (0,), 7), ("last", (1,), 9)]
    assert [v.role for v in reporter.status.rehearsed] == ["first", "new"]


@pytest.mark.parametrize("activity", Activity)
def test_an_event_that_the_table_lacks_changes_nothing(tmp_path: Path, activity: Activity) -> None:
    """Every such cell: the status stays the same, with all that would have come with the event."""
    status = worker_status("h1/job/0.a", activity=activity)
    with reporting(tmp_path, status) as (reporter, _, _):
        before = reporter.status
        refused = [event for event in WorkerTransition if event not in TABLE[activity]]
        for event in refused:
            with pytest.raises(IllegalTransition, match=f"'{event}' cannot happen"):
                reporter.update(event, rank=1, epoch=9, step=9, detail="x")

        assert refused
        assert reporter.status is before


def test_the_memory_kept_for_a_loss_is_reported(tmp_path: Path) -> None:
    """For the inputs of a step that a hot standby may finish; none once nobody follows."""
    with reporting(tmp_path, worker_status("h1/job/0.a")) as (reporter, _, fabric):
        fabric.enter(Membership(epoch=1, members=(member(fabric),)), 0)
        group, given = Group(fabric, "0", (0,)), torch.ones(12)
        fabric.step.begin(keeps=True)
        group.allreduce([given], sync()).wait()
        kept = reporter.current().kept_bytes
        fabric.step.begin(keeps=False)

        assert kept >= given.nbytes
        assert reporter.current().kept_bytes == 0
