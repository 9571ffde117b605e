"""What a hot standby waits for in a step that has broken."""

from __future__ import annotations

import pytest

from tmd.core.planning.directives import Directive, HoldState, ShadowRank, Wait
from tmd.core.values.model import Member
from tmd.trainer.worker.continuation import Decided

BEFORE = ShadowRank(rank=1, size=3, source=Member("h1/job/0.a", "h1", "h1:1"), stay=True)
HELD = HoldState("job-1")


@pytest.mark.parametrize(
    ("directives", "decided"),
    [
        ([BEFORE], [False]),
        ([BEFORE, HELD], [False, False]),
        ([BEFORE, HELD, Wait()], [False, False, True]),
        ([BEFORE, Wait()], [False, True]),
        # The rank lives: only a link has broken.
        ([BEFORE, HELD, BEFORE], [False, False, True]),
        # The news of the plan was overtaken.
        ([HELD, HoldState("job-2"), BEFORE], [False, False, True]),
    ],
)
def test_the_end_of_a_plan_is_a_decision(directives: list[Directive], decided: list[bool]) -> None:
    """A standby that waited on would follow its rank only later."""
    found = Decided(BEFORE)
    assert [found(each) for each in directives] == decided
