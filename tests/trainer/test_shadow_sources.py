"""Which joiners a rank admits, and when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import int64, zeros

from tests.fabric.circle import PATIENCE, Circle, circle, member
from tests.trainer.contexts import context_of
from tests.trainer.scripts import Script
from tests.trainer.showing import FAST
from tests.trainer.wire import Ear, Held, linked
from tmd.core.planning.directives import Sync
from tmd.core.values.model import Membership
from tmd.fabric import Link
from tmd.trainer.protocol import frames
from tmd.trainer.protocol.frames import (
    Begin,
    Boundary,
    Dropped,
    Opening,
    Settled,
    ShadowRequest,
)
from tmd.trainer.shadow.sources import ShadowSources
from tmd.trainer.state.data import Feed
from tmd.trainer.state.placing import DataPlace
from tmd.trainer.state_transfer.verification import StateVerification

pytestmark = pytest.mark.timeout(60)

PLAN = "plan"
DUTY = Sync("plan", Membership(1, ()), 0, 0, ())


class Scene:
    """Rank 0, whose script is at ``place`` in its data, and a fabric that may ask to follow it."""

    def __init__(self, c: Circle, place: Feed | None) -> None:
        rank, *self._others = c.fabrics
        self.script = Script(1)
        self.context = context_of(self.script.registry(), rank, limits=FAST)
        self.context.state.feed = place
        self.mirrors = ShadowSources(self.context)
        self._rank = member(rank)

    def ask(self, plan: str = "", joiner: int = 0) -> tuple[Link, object]:
        """What the rank says to one who wants to follow it, the ``joiner``-th of the others."""
        link = self._others[joiner].connect(self._rank, frames.PURPOSE, timeout=PATIENCE)
        frames.send(link, frames.Envelope(ShadowRequest(plan, 0)))
        frame, _ = frames.receive(link)
        return link, frame

    def copying(self) -> tuple[Ear, int]:
        """The end of the link of a joiner to which the state is copied, and the present step."""
        ear, step = Ear(self.ask(PLAN)[0]), 0
        ear.say(Begin())
        while not any(mirror.copies for mirror in self.mirrors._mirrors):
            step += 1
            self.mirrors.at_boundary(step)
        return ear, step

    def follow(self, step: int, *joiners: int) -> list[Ear]:
        """``joiners`` follow for ``PLAN`` and get all outputs: the ends of their links. A link may
        be one of several of the same joiner."""
        ears = [Ear(self.ask(PLAN, joiner)[0]) for joiner in joiners]
        for ear in ears:
            ear.say(Begin())
        while not all(ear.of(Boundary) for ear in ears):
            step += 1
            self.mirrors.at_boundary(step)
            ears[0].within(0.02, lambda: all(ear.of(Boundary) for ear in ears))
            self.mirrors.close_window()
        return ears


@contextmanager
def scene(place: Feed | None, size: int = 2) -> Iterator[Scene]:
    with circle(size) as c:
        made = Scene(c, place)
        try:
            yield made
        finally:
            made.mirrors.close()


def answer(place: Feed | None) -> object:
    with scene(place) as s:
        link, frame = s.ask()
        link.close()
        return frame


def feed(*, closed: bool) -> Feed:
    made = Feed([1, 2], 0, lambda: 0, lambda: DataPlace(0, 1))
    if closed:
        made.close()
    return made


def test_a_rank_in_its_loop_is_shadowed() -> None:
    assert isinstance(answer(feed(closed=False)), Opening)


@pytest.mark.parametrize("place", [None, feed(closed=True)], ids=["not begun", "over"])
def test_a_rank_outside_of_its_loop_is_not_shadowed(place: Feed | None) -> None:
    """It may be the end: a joiner sent on to a next loop would run the code after training.

    The rank's later offer is included, so that a joiner that does not fit is refused early."""
    frame = answer(place)

    assert isinstance(frame, Dropped)
    assert frame.reason == "the rank is between two batches() calls"
    assert frame.offer is not None


def test_an_unverified_state_is_not_shadowed() -> None:
    """The next step is."""
    step, held, source = 0, Held(), StateVerification()

    def slow() -> dict[str, str]:
        held.stay()
        return {}

    with scene(feed(closed=False)) as s, linked() as (near, far):
        link, _ = s.ask()
        ear, window = Ear(link), s.context.window
        ear.say(Begin())
        while not ear.of(Boundary):
            step += 1
            s.mirrors.at_boundary(step)
            ear.within(0.02, lambda: bool(ear.of(Boundary)))
            s.mirrors.close_window()
        source.verify_joiner(DUTY, near, dict)
        s.context.verification.verify_own(DUTY, far, slow)
        s.mirrors.at_boundary(step + 1)
        unproved = window.version
        held.let_go()
        assert s.context.verification.verdict() == ""
        s.mirrors.at_boundary(step + 2)
        ear.until(lambda: ear.of(Boundary)[-1].step > step)

        assert unproved is None
        assert window.version == step + 2
        assert step + 1 not in [boundary.step for boundary in ear.of(Boundary)]
        source.close()
        s.mirrors.close()
        ear.end()


def test_a_switch_waits_for_each_joiner_that_shadows_the_rank() -> None:
    """Two ranks of a host may have the same source, and the one that came last may be in step."""
    with scene(feed(closed=False), size=3) as s:
        behind, in_step = s.follow(0, 0, 1)
        in_step.say(Settled(9))
        in_step.until(lambda: s.mirrors.hold(PLAN, 10))
        in_time = s.mirrors.hold(PLAN, 9)
        behind.say(Settled(8))
        behind.until(lambda: s.mirrors.hold(PLAN, 9))
        of_another = s.mirrors.hold("another plan", 9)

        assert not in_time
        assert not of_another
        s.mirrors.close()
        behind.end()
        in_step.end()


def test_a_switch_does_not_wait_for_an_earlier_link_of_a_joiner() -> None:
    """The joiner is in step by its new one. That the old one is gone may not be known yet."""
    with scene(feed(closed=False)) as s:
        old, new = s.follow(0, 0, 0)
        old.say(Settled(8))
        new.say(Settled(9))
        new.until(lambda: s.mirrors.hold(PLAN, 10))

        assert not s.mirrors.hold(PLAN, 9)
        s.mirrors.close()
        old.end()
        new.end()


def test_what_is_between_two_calls_is_not_counted_as_a_step() -> None:
    """A script may evaluate there for a minute."""
    with scene(feed(closed=False)) as s:
        ear, step = s.copying()
        s.mirrors.output("allreduce", "0", [zeros(250)])
        s.mirrors.close_feed()
        s.mirrors.at_boundary(step + 1)

        assert not s.mirrors._load.spares(400)
        s.mirrors.close()
        ear.end()


def test_a_step_in_which_a_copy_was_given_up_is_not_counted() -> None:
    """The joiner comes back within the step, of which only a part of the outputs was counted."""
    with scene(feed(closed=False)) as s:
        ear, step = s.copying()
        s.mirrors.output("allreduce", "0", [zeros(250)])
        s.mirrors.at_boundary(step + 1)
        whole = s.mirrors._load.spares(400)
        s.mirrors.drop_all("the link broke")
        again = Ear(s.ask(PLAN)[0])
        again.say(Begin())
        while not any(mirror.copies for mirror in s.mirrors._mirrors):
            step += 1
            s.mirrors.at_boundary(step + 1)
        s.mirrors.output("allreduce", "0", [zeros(1)])
        s.mirrors.drop_all("the link broke again")
        third = Ear(s.ask(PLAN)[0])
        third.until(lambda: bool(s.mirrors._mirrors))
        s.mirrors.at_boundary(step + 2)

        assert whole
        assert s.mirrors._load.spares(400)
        s.mirrors.close()
        for each in (ear, again, third):
            each.end()


def test_sums_of_a_joiner_in_step_are_compared_in_some_steps() -> None:
    """Not what a script calls after the vote, or in an evaluation, or what is no sum of floats: it
    may differ for good reasons."""
    with scene(feed(closed=False)) as s:
        (ear,) = s.follow(0, 0)
        (mirror,) = s.mirrors._mirrors
        ear.say(Settled())
        step = mirror._reached
        while mirror.needs_proof:
            step += 1
            s.mirrors.at_boundary(1000 + step)
        proving, other = 2000, 2001
        floats, integers = [zeros(4)], [zeros(4, dtype=int64)]
        s.mirrors.at_boundary(proving)
        s.mirrors.begin_step(trains=True)
        in_step = [bool(s.mirrors.given("allreduce", "0", t)) for t in (floats, integers)]
        gathers = bool(s.mirrors.given("allgather", "0", floats))
        s.mirrors.voted([1])
        after_vote = bool(s.mirrors.given("allreduce", "0", floats))
        s.mirrors.at_boundary(other)
        s.mirrors.begin_step(trains=True)
        later = bool(s.mirrors.given("allreduce", "0", floats))
        s.mirrors.close()
        ear.end()

    assert in_step == [True, False]
    assert not gathers
    assert not after_vote
    assert not later


@pytest.mark.parametrize("trains", [True, False])
def test_a_joiner_proves_what_it_computes_in_steps_that_train(trains: bool) -> None:
    """In an evaluation a script may gather what its process alone knows, such as what it logged."""
    with scene(feed(closed=False)) as s:
        s.follow(0, 0)
        s.mirrors.begin_step(trains=trains)

        given = s.mirrors.given("allgather", "group", [zeros(1, dtype=int64)])

    assert bool(given) is trains
