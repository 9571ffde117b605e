"""A state that is verified during the step that begins with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.trainer.wire import Held, linked
from tests.trainer.workers import Worker, worker
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
from tmd.core.values.model import Activity, Member, Membership
from tmd.fabric import Link
from tmd.trainer.state.digests import Digest
from tmd.trainer.state_transfer.verification import StateVerification

pytestmark = pytest.mark.timeout(60)

NEW = Membership(2, (Member("a", "h1", "h1:1"), Member("b", "h2", "h2:1")))
DUTY = Sync("plan", NEW, 1, 7, ())


def digest(of: str) -> Callable[[], Digest]:
    return lambda: {"parameters": of}


def slow(held: Held) -> Callable[[], Digest]:
    """It takes until released."""

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
    """A verdict may be known before its thread has closed the link."""
    for thread in threading.enumerate():
        if thread.name == "tmd-verification":
            thread.join()


def test_equal_states_are_verified_while_both_sides_continue(
    held: Held, links: tuple[Link, Link]
) -> None:
    """Neither side waits before it asks; afterwards every call gives the same verdict."""
    source, joiner = StateVerification(), StateVerification()
    source.verify_joiner(DUTY, links[0], slow(held))
    joiner.verify_own(DUTY, links[1], digest("same"))
    assert held.wait()
    assert joiner.pending
    assert source.running
    assert not source.pending
    held.let_go()

    assert [joiner.verdict(), joiner.verdict()] == ["", ""]
    assert not joiner.pending
    join_comparisons()
    assert all(link.ended for link in links)


def test_a_different_state_is_refuted_until_it_is_given_back(links: tuple[Link, Link]) -> None:
    source, joiner = StateVerification(), StateVerification()
    source.verify_joiner(DUTY, links[0], digest("same"))
    joiner.verify_own(DUTY, links[1], digest("other"))

    assert "different states" in joiner.verdict()
    assert joiner.pending
    copied = joiner.later()
    joiner.drop()
    assert "different states" in copied()
    assert not joiner.pending
    assert joiner.verdict() == ""


def test_a_source_that_dies_has_proved_nothing(links: tuple[Link, Link]) -> None:
    joiner = StateVerification()
    joiner.verify_own(DUTY, links[1], digest("same"))
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
    source.verify_joiner(DUTY, links[0], fail if side == "source" else digest("same"))
    joiner.verify_own(DUTY, links[1], fail if side == "joiner" else digest("same"))

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
def test_another_directive_ends_the_comparison(
    side: str, waits: str, directive: Directive, held: Held, links: tuple[Link, Link]
) -> None:
    """It waits neither for the other side nor for a digest of its own."""
    source, joiner = StateVerification(), StateVerification()
    source.verify_joiner(DUTY, links[0], slow(held) if waits == "source" else digest("same"))
    joiner.verify_own(DUTY, links[1], slow(held) if waits == "joiner" else digest("same"))
    assert held.wait()
    told = source if side == "source" else joiner
    told.cancel_unless(directive)

    assert not told.running
    if told is joiner or waits == "source":
        assert "not compared" in joiner.verdict()


@pytest.mark.parametrize("directive", [DUTY, Resume("plan", NEW, 1), Train(NEW, 1)])
def test_the_new_epoch_does_not_end_the_comparison(
    directive: Directive, held: Held, links: tuple[Link, Link]
) -> None:
    source, joiner = StateVerification(), StateVerification()
    source.verify_joiner(DUTY, links[0], slow(held))
    joiner.verify_own(DUTY, links[1], digest("same"))
    assert held.wait()
    for side in (source, joiner):
        side.cancel_unless(directive)
    held.let_go()

    assert joiner.verdict() == ""


def test_without_a_thread_all_ranks_wait(
    links: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, joiner = StateVerification(), StateVerification()
    source.verify_joiner(DUTY, links[0], digest("same"))

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    joiner.verify_own(DUTY, links[1], digest("same"))

    assert not joiner.pending


# --- a survivor of another loss -------------------------------------------------------------------


VERDICTS = pytest.mark.parametrize(
    ("there", "becomes"), [("other", Activity.STANDBY), ("same", Activity.STUCK)]
)


@contextmanager
def survivor(folder: Path, there: str, activity: Activity) -> Iterator[Worker]:
    """A worker that has taken a state on trust, and whose source has the state ``there``."""
    source = StateVerification()
    with (
        linked() as (near, far),
        worker(folder, size=2, activity=activity, rank=1, step=7, plan="plan") as made,
    ):
        source.verify_joiner(DUTY, near, digest(there))
        made.context.verification.verify_own(DUTY, far, digest("same"))
        yield made
        source.close()


@VERDICTS
def test_a_refuted_state_is_given_back_when_its_step_breaks(
    tmp_path: Path, there: str, becomes: Activity
) -> None:
    """The other ranks would go on from a state that is not the rank's."""
    with survivor(tmp_path, there, Activity.TRAINING) as made:
        made.parts.recovery.halt(undecided=False)

        assert made.status.activity is becomes


@VERDICTS
def test_a_refuted_state_is_given_back_before_its_first_step(
    tmp_path: Path, there: str, becomes: Activity
) -> None:
    """The plan is reopened while this worker waits for the others."""
    with survivor(tmp_path, there, Activity.SYNCED) as made:
        made.obey(Hold("next", 2))
        made.parts.recovery.rejoin()

        assert made.status.activity is becomes


def test_a_synced_joiner_stands_by_when_the_plan_is_reopened_without_it(tmp_path: Path) -> None:
    """Another joiner has failed, and the leader may choose any standby."""
    with survivor(tmp_path, "same", Activity.SYNCED) as made:
        made.obey(HoldState("plan"))
        made.parts.recovery.rejoin()

        assert made.status.activity is Activity.STANDBY
