"""A hot standby that does not hear how its rank's vote ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tmd.core.planning.directives import Directive, Hold, HoldState, ShadowRank, Sync, Wait
from tmd.core.values.model import Member, Membership
from tmd.trainer.session.hooks import Interrupted
from tmd.trainer.worker.unheard_vote import wait_for_outcome

STEP = 5
FOLLOWS = ShadowRank(rank=1, size=2, source=Member("w", "h", "h:1"), stay=True)
TAKES = Sync("p", Membership(2, ()), rank=1, resume=STEP + 1, moves=())


class Orders:
    """An agent that gets each of ``directives`` in turn, and then nothing."""

    def __init__(self, *directives: Directive) -> None:
        self._left = list(directives)

    def wait_a_while(self, wanted: Any, seconds: float) -> Directive | None:
        while self._left:
            if wanted(directive := self._left.pop(0)):
                return directive
        return None

    def wait_until(self, wanted: Any) -> Directive:
        found = self.wait_a_while(wanted, 0.0)
        assert found is not None
        return found


class Standby:
    """It follows the rank, has all gradients of the step, and reports."""

    def __init__(self) -> None:
        self.undecided: list[bool] = []
        self.following = SimpleNamespace(
            directive=FOLLOWS,
            shadow=SimpleNamespace(mismatch=""),
            has_state=True,
            refutation=lambda: None,
            step=STEP,
            stands_in=False,
        )

    def report_standing_by(self, following: object, *, undecided: bool) -> None:
        self.undecided.append(undecided)

    def update(self, *, undecided: bool) -> None:
        self.undecided.append(undecided)

    def committed(self, *directives: Directive) -> bool:
        it: Any = self
        orders: Any = Orders(*directives)
        return wait_for_outcome(it, orders, it)


@pytest.mark.parametrize(
    "before",
    [(), (HoldState("p"),), (Hold("p", 1),), (HoldState("p"), Hold("p", 1), HoldState("p"))],
    ids=["at once", "its rank is lost", "a joiner is lost", "both"],
)
def test_it_commits_the_step_that_another_rank_has_committed(before: tuple[Directive, ...]) -> None:
    """However often the plan is rewritten before it hears of that."""
    standby = Standby()

    assert standby.committed(FOLLOWS, *before, TAKES)
    assert standby.following.stands_in
    assert standby.undecided == [True]


@pytest.mark.parametrize("last", [Wait(), Sync("p", TAKES.membership, 1, STEP, ())])
def test_it_does_not_commit_a_step_that_no_rank_has_committed(last: Directive) -> None:
    standby = Standby()

    assert not standby.committed(HoldState("p"), last)
    assert not standby.following.stands_in
    assert standby.undecided == [True, False]


def test_without_news_the_step_is_interrupted() -> None:
    standby = Standby()
    with pytest.raises(Interrupted):
        standby.committed(FOLLOWS)

    assert standby.undecided == [True, False]
