"""A shadow uses all frames of its rank, and stops waiting once the rank is dead."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.trainer.scripts import Script, normed
from tests.trainer.tailing import LIMITS, pair
from tmd.core.planning.directives import HoldState, Wait
from tmd.core.values.errors import LinkError
from tmd.trainer.protocol.frames import Settled, Tail
from tmd.trainer.state.layout import flatten

pytestmark = pytest.mark.timeout(60)


def test_in_a_recovery_frames_of_a_live_rank_still_count() -> None:
    with pair(lambda seed: Script(seed, build=normed)) as p:
        p.meet()
        p.joiner.following.give_way(HoldState("plan"))
        p.together(2)

        assert p.joiner.error is None
        p.assert_equal()


@pytest.mark.parametrize(
    "directive", [HoldState("plan", over=True), Wait()], ids=["is dead", "other directive"]
)
def test_a_link_that_stays_open_is_not_waited_for(directive: HoldState | Wait) -> None:
    """The kernel of a killed process may close its links late."""
    with pair(lambda seed: Script(seed, build=normed)) as p:
        p.meet()
        p.joiner.following.give_way(directive)
        p.joiner.until(lambda: p.joiner.error is not None)

        assert isinstance(p.joiner.error, LinkError)


def test_once_in_step_a_joiner_says_at_each_step_where_it_is() -> None:
    with pair(Script) as p:
        p.meet()
        before = [f for f in p.joiner.shadow.frames if isinstance(f, Settled)]
        p.joiner.following.settle()
        p.together(3)
        steps = [f.step for f in p.joiner.shadow.frames if isinstance(f, Settled)]

        assert before == []
        assert steps[1:] == [p.joiner.at - n for n in (2, 1, 0)]


def test_a_step_that_is_longer_than_the_patience_is_not_too_late() -> None:
    """After one step of its own the joiner does not know yet how long a step is."""
    with pair(Script) as p:
        p.joiner.following._limits = structs.replace(LIMITS, patience_s=1e-9)
        p.meet()
        p.together(3)

        assert p.joiner.error is None
        assert p.joiner.following.in_step


def test_there_is_no_state_between_a_tail_and_its_boundary() -> None:
    """The parameters are those of the next step already, whatever the current step number."""
    with pair(Script) as p:
        p.meet()
        p.together(2)
        following, units = p.joiner.following, p.joiner.units
        following._announced = following.step
        assert following.has_state
        assert following._may_begin()

        layout, values = flatten(units.values(0))
        following._follow(Tail(following.step, 0, (), layout), values)
        assert not following.has_state
        assert not following._may_begin()
