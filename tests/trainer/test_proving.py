"""A state that is compared beside the step that begins with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.wire import linked
from tmd.core.duties import Duty, Finish, Hold, Keep, Leave, Resume, Sync, Train, Wait
from tmd.core.model import Activity, Member, Membership
from tmd.fabric import Link
from tmd.trainer.proving import Proving
from tmd.trainer.recovery import Recovery
from tmd.trainer.transfer import Digest

pytestmark = pytest.mark.timeout(60)

NEW = Membership(2, (Member("a", "h1", "h1:1"), Member("b", "h2", "h2:1")))
DUTY = Sync("plan", NEW, 1, 7, ())


def digest(of: str) -> Callable[[], Digest]:
    return lambda: {"parameters": of}


class Held:
    """A digest that takes until it is let go."""

    def __init__(self) -> None:
        self._asked, self._go = threading.Event(), threading.Event()

    def __call__(self) -> Digest:
        self._asked.set()
        self._go.wait()
        return {"parameters": "same"}

    def wait(self) -> None:
        self._asked.wait()

    def let_go(self) -> None:
        self._go.set()


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    with linked() as ends:
        yield ends
    for thread in threading.enumerate():
        if thread.name == "tmd-proving":
            thread.join()


def test_equal_states_are_found_equal_while_both_go_on(links: tuple[Link, Link]) -> None:
    """Neither waits before it is asked; then there is no doubt, however often it is asked."""
    source, joiner, held = Proving(), Proving(), Held()
    source.give(DUTY, links[0], held)
    joiner.take(DUTY, links[1], digest("same"))
    held.wait()
    assert joiner.pending
    assert not source.pending
    held.let_go()

    assert [joiner.verdict(), joiner.verdict(), source.verdict()] == ["", "", ""]
    assert not joiner.pending
    assert all(link.ended for link in links)


def test_a_state_that_differs_is_doubted_until_it_is_given_back(links: tuple[Link, Link]) -> None:
    source, joiner = Proving(), Proving()
    source.give(DUTY, links[0], digest("same"))
    joiner.take(DUTY, links[1], digest("other"))

    assert "different states" in joiner.verdict()
    assert joiner.pending
    assert source.verdict() == ""
    copied = joiner.later()
    joiner.drop()
    assert "different states" in copied()
    assert not joiner.pending
    assert joiner.verdict() == ""


def test_a_source_that_dies_has_proved_nothing(links: tuple[Link, Link]) -> None:
    joiner = Proving()
    joiner.take(DUTY, links[1], digest("same"))
    links[0].close()

    assert "not compared" in joiner.verdict()


@pytest.mark.parametrize("side", ["source", "joiner"])
def test_a_digest_that_fails_proves_nothing(side: str, links: tuple[Link, Link]) -> None:
    def fail() -> Digest:
        raise RuntimeError("no memory on the device")

    source, joiner = Proving(), Proving()
    source.give(DUTY, links[0], fail if side == "source" else digest("same"))
    joiner.take(DUTY, links[1], fail if side == "joiner" else digest("same"))

    assert "not compared" in joiner.verdict()


@pytest.mark.parametrize(
    "duty",
    [
        Hold("next", 2),
        Wait(),
        Keep("next"),
        Leave(),
        Finish(),
        Sync("plan", NEW, 1, 8, ()),
        Train(Membership(3, NEW.members), 1),
    ],
    ids=lambda duty: type(duty).__name__,
)
@pytest.mark.parametrize("side", ["source", "joiner"])
def test_another_duty_ends_it(side: str, duty: Duty, links: tuple[Link, Link]) -> None:
    """Whoever hangs is not waited for any longer than training waits for it."""
    source, joiner, held = Proving(), Proving(), Held()
    source.give(DUTY, links[0], held)
    joiner.take(DUTY, links[1], digest("same"))
    held.wait()
    (source if side == "source" else joiner).cancel_unless(duty)

    assert "not compared" in joiner.verdict()
    held.let_go()


@pytest.mark.parametrize("duty", [DUTY, Resume("plan", NEW, 1), Train(NEW, 1)])
def test_the_epoch_that_begins_does_not(duty: Duty, links: tuple[Link, Link]) -> None:
    source, joiner, held = Proving(), Proving(), Held()
    source.give(DUTY, links[0], held)
    joiner.take(DUTY, links[1], digest("same"))
    held.wait()
    for side in (source, joiner):
        side.cancel_unless(duty)
    held.let_go()

    assert joiner.verdict() == ""


def test_without_a_thread_all_wait(
    links: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, joiner = Proving(), Proving()
    source.give(DUTY, links[0], digest("same"))

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    joiner.take(DUTY, links[1], digest("same"))

    assert not joiner.pending


# --- a survivor of another loss -------------------------------------------------------------------


def halted(why: str) -> list[object]:
    """What a worker says that halts with such a verdict on its state."""
    said: list[object] = []
    status = SimpleNamespace(step=7, rank=1, world_size=2, plan="plan")

    def say(activity: Activity, **more: object) -> None:
        said.append(activity)

    voice: Any = SimpleNamespace(status=status, say=say)
    agent: Any = SimpleNamespace(duty=None)
    fabric: Any = SimpleNamespace(poison_reason="", suspects=())
    carrier: Any = SimpleNamespace(
        proving=SimpleNamespace(verdict=lambda: why), early=SimpleNamespace(stand=lambda step: None)
    )
    handover: Any = SimpleNamespace(to_pool=lambda: say(Activity.STANDBY))
    snapshots: Any = SimpleNamespace(give_up=lambda: None)
    Recovery(voice, agent, fabric, carrier, handover, snapshots).halt(undecided=False)
    return said


def test_who_cannot_prove_its_state_does_not_claim_it() -> None:
    """Others would go on from it."""
    assert halted("source and joiner have different states") == [Activity.STANDBY]
    assert halted("") == [Activity.STUCK]
