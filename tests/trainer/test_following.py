"""Who follows a rank goes on to the end of what that has sent, and no further once it is dead."""

from __future__ import annotations

import pytest

from tests.trainer.scripts import Script, normed
from tests.trainer.tailing import pair
from tmd.core.duties import Keep, Wait
from tmd.core.errors import LinkError

pytestmark = pytest.mark.timeout(60)


def test_in_a_recovery_what_a_live_rank_sends_still_counts() -> None:
    with pair(lambda seed: Script(seed, build=normed)) as p:
        p.meet()
        p.joiner.following.give_way(Keep("plan"))
        p.together(2)

        assert p.joiner.error is None
        p.assert_equal()


@pytest.mark.parametrize("duty", [Keep("plan", over=True), Wait()], ids=["is dead", "other duty"])
def test_a_link_that_stays_open_is_not_waited_for(duty: Keep | Wait) -> None:
    """The kernel of a killed process closes its links when it comes to that."""
    with pair(lambda seed: Script(seed, build=normed)) as p:
        p.meet()
        p.joiner.following.give_way(duty)
        p.joiner.until(lambda: p.joiner.error is not None)

        assert isinstance(p.joiner.error, LinkError)
