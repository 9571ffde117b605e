"""What a tail cannot reproduce is copied once while the source waits, and reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.trainer.scripts import Averaged, Closed, Hiding, Scaled, Script, Sparse
from tests.trainer.tailing import pair
from tmd.trainer.protocol.frames import Begin
from tmd.trainer.shadow.receiver import Differs

pytestmark = pytest.mark.timeout(60)

NOT_FOLLOWED: dict[str, Callable[[int], Script]] = {
    "average outside of optimizers": Averaged,
    "closure": Closed,
    "unscaled inside the optimizer": Scaled,
    "sparse gradients": Sparse,
}


@pytest.mark.parametrize("make", NOT_FOLLOWED.values(), ids=NOT_FOLLOWED.keys())
def test_everything_is_copied_after_a_replay_that_differs(make: Callable[[int], Script]) -> None:
    """The joiner notices the difference, asks for the copy, reports it, and is then in step."""
    with pair(make) as p:
        p.meet()
        p.fall_back()
        p.together(3)

        assert p.joiner.shadow.frames == [Begin(), Begin(whole=True)]
        assert p.joiner.following.units == 2 * len(p.source.units)
        assert "training waited for a whole copy" in p.joiner.following.note
        assert "parameters and optimizer state at the start of step" in p.joiner.following.note
        p.assert_equal()


def test_a_late_replay_that_differs_is_no_error_of_the_joiner() -> None:
    """The copied state was equal, and so was what the joiner computed itself. Only replaying step
    50 from gradients gives another result."""
    with pair(lambda seed: Averaged(seed, every=50), trained=2) as p:
        p.meet()
        p.together(2)
        assert p.source.step < 50
        p.fall_behind(50)
        p.joiner.until(lambda: p.joiner.lacks_state or p.joiner.error is not None)
        assert p.joiner.error is None
        p.source.commit()
        p.fall_back()
        p.together(3)

        assert p.joiner.shadow.frames == [Begin(), Begin(whole=True)]
        p.assert_equal_at_last()


def test_hidden_optimizer_state_is_detected() -> None:
    """Everything registered was copied and equal, but the results differ, which is reported before
    the joiner could ever be in step."""
    with pair(lambda seed: Script(seed, lambda model: [Hiding(model)])) as p:
        p.meet()
        p.fall_back()
        error = p.come_apart()
        copied = p.copied_at

        assert p.joiner.shadow.frames == [Begin(), Begin(whole=True)]
        assert p.joiner.pictures[copied][0] == p.source.pictures[copied]
        assert isinstance(error, Differs)
        assert "parameters and optimizer state" in str(error)
        assert not p.joiner.following.in_step
