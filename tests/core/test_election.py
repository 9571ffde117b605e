"""When a candidate may believe that it leads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tmd.core.planning.election import (
    MOST_PERIODS,
    SAFE_PART,
    Denied,
    Granted,
    Lease,
    next_attempt,
    updated,
)

TIMES = st.floats(min_value=0, max_value=1e6)
TTLS = st.floats(min_value=0.1, max_value=60)
CHANCES = st.floats(min_value=0, max_value=1, exclude_max=True)


def test_a_new_candidate_does_not_lead():
    """It believes nothing before the store has answered."""
    assert not Lease().held(0.0)


@given(sent=TIMES, ttl=TTLS, took=TIMES)
def test_belief_ends_before_the_lease_can_lapse(sent, ttl, took):
    """However late the answer, belief counts from before the request."""
    lease = updated(Lease(), Granted(epoch=7), sent_at=sent, ttl_s=ttl)

    assert lease.epoch == 7
    assert lease.until < sent + ttl
    assert lease.held(sent + took) == (sent + took < sent + SAFE_PART * ttl)


def test_a_denial_ends_belief_at_once():
    lease = updated(Lease(), Granted(epoch=7), sent_at=0, ttl_s=9)
    lease = updated(lease, Denied(holder="b", remaining_s=5), sent_at=1, ttl_s=9)

    assert not lease.held(1.0)


@given(remaining=TTLS, renew=TTLS, chance=CHANCES)
def test_a_follower_returns_when_the_lease_can_have_lapsed(remaining, renew, chance):
    """Not before the known lease can lapse, but always after a few periods."""
    pause = next_attempt(Denied("b", remaining), renew_s=renew, chance=chance, leads=False)

    assert 0 < pause <= MOST_PERIODS * renew
    assert pause > remaining or pause == MOST_PERIODS * renew


@given(renew=TTLS, chance=CHANCES)
def test_a_holder_renews_early_rather_than_late(renew, chance):
    for answer in (Granted(epoch=1), None):
        assert (
            renew * 0.8 <= next_attempt(answer, renew_s=renew, chance=chance, leads=False) <= renew
        )


def test_a_leader_without_an_answer_asks_again_at_once():
    """It has asked ``renew_s`` after it last got the lease, and waited for the answer."""
    found = [next_attempt(None, renew_s=3.0, chance=0.0, leads=leads) for leads in (True, False)]

    assert found == [0.0, 3.0]
