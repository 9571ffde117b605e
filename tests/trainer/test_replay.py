"""A rehearsal computes a recorded step, long after its rank, and must give the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.trainer.scripts import Script, normed
from tests.trainer.tailing import Pair, Replayed, pair
from tests.trainer.test_tail_differs import flip_parameter
from tests.trainer.wire import Held
from tmd.core.planning.directives import Directive, HoldState, Wait
from tmd.core.values.errors import LinkError
from tmd.trainer.shadow.receiver import Differs

pytestmark = pytest.mark.timeout(60)


def held_in_step(p: Pair) -> Held:
    """The joiner's own steps, in which it waits until released."""
    held, backward = Held(), p.joiner.script.backward

    def stays(batch: int) -> None:
        held.stay()
        backward(batch)

    p.joiner.script.backward = stays  # type: ignore[method-assign]
    return held


@contextmanager
def rehearsal() -> Iterator[tuple[Pair, Held]]:
    """A rehearsal up to the joiner's first step, when its rank is already further."""
    with pair(lambda seed: Script(seed, build=normed), kind=Replayed) as p:
        held = held_in_step(p)
        p.meet()
        begun = False
        while not begun:
            p.source.begin()
            begun = held.wait(0.02)
            p.source.commit()
        try:
            yield p, held
        finally:
            held.let_go()


def test_a_recorded_step_is_computed_long_after_its_rank() -> None:
    """The rank is released once the recording is complete."""
    with rehearsal() as (p, held):
        assert p.source.mirror is not None
        while not p.source.mirror.over:
            p.source.train(1)
        p.source.train(20)
        told = p.joiner.following.status()
        p.joiner.may_go_on.clear()
        held.let_go()
        p.joiner.until(lambda: p.joiner.computed == 1)

        assert not p.joiner.following.in_step
        p.joiner.following.go_on(p.joiner.feed)
        assert p.joiner.following.in_step
        assert p.joiner.following.step < p.source.step - 15
        # Otherwise a recovery would wait for a state that never comes.
        assert told.verified is None
        assert not p.joiner.following.has_state
        p.assert_equal()


def test_other_bits_in_a_recorded_step_are_found() -> None:
    """The copied state was equal, so any difference comes from this worker's own work."""
    with rehearsal() as (p, held):
        flip_parameter(p.joiner.script)
        held.let_go()
        p.joiner.until(lambda: p.joiner.error is not None)

        assert isinstance(p.joiner.error, Differs)
        assert not p.joiner.following.in_step


@pytest.mark.parametrize("directive", [Wait(), HoldState("plan")])
def test_a_replay_gives_way(directive: Directive) -> None:
    """No link ends it: it would continue while a more urgent directive waits."""
    with rehearsal() as (p, held):
        p.joiner.following.give_way(directive)
        assert p.joiner.following.spoilt
        held.let_go()
        p.joiner.until(lambda: p.joiner.error is not None)

        assert isinstance(p.joiner.error, LinkError)
        assert p.joiner.computed == 1


class LateProof(Replayed):
    """The comparison of its state takes until the second attempt to record a step."""

    tried: list[int]

    @property
    def _proved(self) -> bool:
        self.tried = [*getattr(self, "tried", ()), self.step]
        return len(self.tried) > 1


class NoProof(Replayed):
    """The comparison of its state takes for ever."""

    _proved = False


def test_no_step_is_recorded_from_an_unverified_state() -> None:
    """A wrong tail would be blamed on this worker: it catches up, and tries again."""
    with pair(Script, kind=LateProof) as p:
        p.meet()
        while p.joiner.computed == 0:
            p.source.begin()
            p.joiner.within(0.02, lambda: p.joiner.computed > 0)
            p.source.commit()

        following = p.joiner.following
        assert isinstance(following, LateProof)
        tried = following.tried
        assert len(tried) == 2
        assert tried[0] < tried[1] < p.joiner.at
        p.assert_equal()


def test_a_call_that_ends_meanwhile_is_no_step_to_compute() -> None:
    """It is sent to the rank's present position, without having computed anything."""
    with pair(Script, kind=NoProof) as p:
        p.meet()
        p.source.call = 1
        while not p.joiner.walked_on:
            p.source.begin()
            p.joiner.within(0.02, lambda: p.joiner.walked_on)
            p.source.commit()

        assert not p.joiner.following.may_run
        assert p.joiner.computed == 0


def test_a_step_that_exceeds_the_memory_is_shadowed_live() -> None:
    """It is shadowed live, as by any other joiner."""
    with pair(Script, kind=Replayed) as p:
        p.joiner.shadow.full = True
        p.meet()
        p.together(2)

        assert p.joiner.following.in_step
        assert p.source.mirror is not None
        assert not p.source.mirror.over
        p.assert_equal()
