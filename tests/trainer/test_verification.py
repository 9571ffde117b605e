"""A state that is compared beside the step that begins with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.contexts import context_of
from tests.trainer.scripts import Script
from tests.trainer.wire import Held, linked
from tmd.core.planning.directives import (
    Directive,
    Finish,
    Hold,
    HoldState,
    Leave,
    Resume,
    Sync,
    Train,
    Wait,
)
from tmd.core.values.model import Activity, Member, Membership, WorkerStatus
from tmd.core.worker.transitions import WorkerTransition
from tmd.fabric import Link
from tmd.fabric.counters import LinkCounters
from tmd.trainer.state.digests import Digest
from tmd.trainer.state_transfer.verification import StateVerification
from tmd.trainer.worker.recovery import Recovery
from tmd.trainer.worker.status_reporter import StatusReporter

pytestmark = pytest.mark.timeout(60)

NEW = Membership(2, (Member("a", "h1", "h1:1"), Member("b", "h2", "h2:1")))
DUTY = Sync("plan", NEW, 1, 7, ())


def digest(of: str) -> Callable[[], Digest]:
    return lambda: {"parameters": of}


def slow(held: Held) -> Callable[[], Digest]:
    """It takes until it is let go."""

    def taken() -> Digest:
        held.stay()
        return digest("same")()

    return taken


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def links(held: Held) -> Iterator[tuple[Link, Link]]:
    with linked() as ends:
        yield ends
    held.let_go()
    join_comparisons()


def join_comparisons() -> None:
    """A verdict is out before the thread that found it has closed its link."""
    for thread in threading.enumerate():
        if thread.name == "tmd-proving":
            thread.join()


def test_equal_states_are_found_equal_while_both_go_on(
    held: Held, links: tuple[Link, Link]
) -> None:
    """Neither waits before it is asked; then there is no doubt, however often it is asked."""
    source, joiner = StateVerification(), StateVerification()
    source.give(DUTY, links[0], slow(held))
    joiner.take(DUTY, links[1], digest("same"))
    assert held.wait()
    assert joiner.pending
    assert source.running
    assert not source.pending
    held.let_go()

    assert [joiner.verdict(), joiner.verdict()] == ["", ""]
    assert not joiner.pending
    join_comparisons()
    assert all(link.ended for link in links)


def test_a_state_that_differs_is_doubted_until_it_is_given_back(links: tuple[Link, Link]) -> None:
    source, joiner = StateVerification(), StateVerification()
    source.give(DUTY, links[0], digest("same"))
    joiner.take(DUTY, links[1], digest("other"))

    assert "different states" in joiner.verdict()
    assert joiner.pending
    copied = joiner.later()
    joiner.drop()
    assert "different states" in copied()
    assert not joiner.pending
    assert joiner.verdict() == ""


def test_a_source_that_dies_has_proved_nothing(links: tuple[Link, Link]) -> None:
    joiner = StateVerification()
    joiner.take(DUTY, links[1], digest("same"))
    links[0].close()

    assert "not compared" in joiner.verdict()


@pytest.mark.parametrize("error", [RuntimeError("no memory on the device"), SystemExit(0)])
@pytest.mark.parametrize("side", ["source", "joiner"])
def test_a_digest_that_fails_proves_nothing(
    side: str, error: BaseException, links: tuple[Link, Link]
) -> None:
    def fail() -> Digest:
        raise error

    source, joiner = StateVerification(), StateVerification()
    source.give(DUTY, links[0], fail if side == "source" else digest("same"))
    joiner.take(DUTY, links[1], fail if side == "joiner" else digest("same"))

    assert "not compared" in joiner.verdict()


@pytest.mark.parametrize(
    "directive",
    [
        Hold("next", 2),
        Wait(),
        HoldState("next"),
        Leave(),
        Finish(),
        Sync("plan", NEW, 1, 8, ()),
        Train(Membership(3, NEW.members), 1),
    ],
    ids=lambda directive: type(directive).__name__,
)
@pytest.mark.parametrize("waits", ["source", "joiner"])
@pytest.mark.parametrize("side", ["source", "joiner"])
def test_another_duty_ends_it(
    side: str, waits: str, directive: Directive, held: Held, links: tuple[Link, Link]
) -> None:
    """Who hears of it waits neither for the other side nor for a digest of its own."""
    source, joiner = StateVerification(), StateVerification()
    source.give(DUTY, links[0], slow(held) if waits == "source" else digest("same"))
    joiner.take(DUTY, links[1], slow(held) if waits == "joiner" else digest("same"))
    assert held.wait()
    told = source if side == "source" else joiner
    told.cancel_unless(directive)

    assert not told.running
    if told is joiner or waits == "source":
        assert "not compared" in joiner.verdict()


@pytest.mark.parametrize("directive", [DUTY, Resume("plan", NEW, 1), Train(NEW, 1)])
def test_the_epoch_that_begins_does_not(
    directive: Directive, held: Held, links: tuple[Link, Link]
) -> None:
    source, joiner = StateVerification(), StateVerification()
    source.give(DUTY, links[0], slow(held))
    joiner.take(DUTY, links[1], digest("same"))
    assert held.wait()
    for side in (source, joiner):
        side.cancel_unless(directive)
    held.let_go()

    assert joiner.verdict() == ""


def test_without_a_thread_all_wait(
    links: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, joiner = StateVerification(), StateVerification()
    source.give(DUTY, links[0], digest("same"))

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    joiner.take(DUTY, links[1], digest("same"))

    assert not joiner.pending


# --- a survivor of another loss -------------------------------------------------------------------


def recovery(
    why: str, activity: Activity, directive: Directive | None = None
) -> tuple[Recovery, StatusReporter]:
    """Of a worker in ``activity`` with such a verdict on its state, under ``directive``."""
    status = WorkerStatus("h1/j/0", "j", 2, "h1:1", 1, activity, rank=1, step=7, plan="plan")
    reporter = StatusReporter(status)
    agent: Any = SimpleNamespace(
        directive=directive,
        start=lambda: None,
        tell=lambda: None,
        wait_until=lambda wanted: directive if wanted(directive) else None,
    )
    fabric: Any = SimpleNamespace(
        address="h1:1", poison_reason="", suspects=(), rank=1, built=(), counters=LinkCounters()
    )
    context = context_of(Script(1).registry(), fabric)
    refuted: Any = SimpleNamespace(verdict=lambda: why, running=False)
    context = replace(context, verification=refuted)
    migration: Any = SimpleNamespace(to_pool=lambda: reporter.update(WorkerTransition.STOOD_BY))
    snapshots: Any = SimpleNamespace(give_up=lambda: None)
    reporter.open(agent, fabric)
    return Recovery(reporter, agent, context, migration, snapshots), reporter


DIFFERS = "source and joiner have different states"
VERDICTS = pytest.mark.parametrize(
    ("why", "becomes"), [(DIFFERS, Activity.STANDBY), ("", Activity.STUCK)]
)


@VERDICTS
def test_a_refuted_state_is_given_back_when_its_step_breaks(why: str, becomes: Activity) -> None:
    """The other ranks would go on from a state that is not the rank's."""
    made, reporter = recovery(why, Activity.TRAINING)
    made.halt(undecided=False)

    assert reporter.status.activity is becomes


@VERDICTS
def test_a_refuted_state_is_given_back_before_its_first_step(why: str, becomes: Activity) -> None:
    """The plan is reopened while this worker waits for the others."""
    made, reporter = recovery(why, Activity.SYNCED, Hold("next", 2))
    made.rejoin()

    assert reporter.status.activity is becomes


def test_a_synced_joiner_stands_by_when_the_plan_is_reopened_without_it() -> None:
    """Another joiner has failed, and the leader may choose any standby."""
    made, reporter = recovery("", Activity.SYNCED, HoldState("plan"))
    made.rejoin()

    assert reporter.status.activity is Activity.STANDBY
