"""The agreement of ranks in a vote, and disagreements that it must detect."""

import pytest

from tests.fabric.circle import circle
from tmd.core.values.model import Member, Membership
from tmd.trainer.protocol.step_vote import VoteKind, agree, ticket


def membership(epoch, *hosts):
    return Membership(epoch, tuple(Member(f"{h}/job/0.a", h, f"{h}:1") for h in hosts))


THIS = ticket(membership(5, "h1", "h2", "s1"))
OTHER = ticket(membership(5, "h1", "h2", "s2"))
LATER = ticket(membership(6, "h1", "h2", "s1"))


@pytest.mark.parametrize(
    ("armed", "agreed"),
    [
        ((THIS, THIS, THIS), THIS),
        ((0, 0, 0), 0),
        ((THIS, 0, THIS), 0),
        ((THIS, OTHER, THIS), 0),
        ((THIS, LATER, LATER), 0),
    ],
    ids=["all", "none", "one not", "another joiner in the same epoch", "another epoch"],
)
def test_ranks_switch_only_if_all_mean_the_same(armed, agreed):
    """After Redis has lost writes two leaders may have announced two changes with one epoch."""
    with circle(3) as c:
        found = c.each(lambda f: agree(f, 7, armed[f.rank], VoteKind.STEPPING)[0])

    assert found == [agreed] * 3


def test_an_update_that_only_some_ranks_leave_out_is_an_error():
    """Their weights would differ from then on."""
    kinds = [VoteKind.STEPPING, VoteKind.SKIPPING, VoteKind.STEPPING]

    def vote(fabric):
        with pytest.raises(RuntimeError, match="leave out the update of the same ones"):
            agree(fabric, 7, 0, kinds[fabric.rank])
        return True

    with circle(3) as c:
        assert c.each(vote) == [True] * 3


def test_a_ticket_fits_into_the_vote():
    assert 0 < ticket(membership(2**31 - 1, "h1")) < 2**63
