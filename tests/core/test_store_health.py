"""Whether the store serves a daemon: one log line for each change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tmd.core.alerts.store_health import (
    CAUSES_REPORTED,
    STEADY_S,
    HealthChange,
    StoreLoop,
    StoreState,
    failed,
    worked,
)

FULL, AWAY = "out of memory", "nothing listens"


def test_a_store_that_refuses_writes_and_answers_reads_is_reported_once():
    """Two loops alternate, one of which fails for ten minutes."""
    state, changes = StoreState(), []
    for second in range(600):
        state, first = failed(state, StoreLoop.HEARTBEAT, FULL, float(second))
        state, second_ = worked(state, StoreLoop.RECORDS, second + 0.5)
        changes += [c for c in (first, second_) if c is not None]

    assert changes == [HealthChange.LOST]
    assert state.causes == (FULL,)


def test_the_store_is_back_only_after_a_time_without_failures():
    state, lost = failed(StoreState(), StoreLoop.HEARTBEAT, FULL, 10.0)
    state, early = worked(state, StoreLoop.HEARTBEAT, 10.1)
    still = state.causes
    state, back = worked(state, StoreLoop.LEASE, 10.0 + STEADY_S)

    assert (lost, early, still) == (HealthChange.LOST, None, (FULL,))
    assert (back, state.causes) == (HealthChange.BACK, ())


def test_the_store_is_not_back_while_one_loop_fails():
    state, _ = failed(StoreState(), StoreLoop.ALERTS, FULL, 0.0)
    state, change = worked(state, StoreLoop.LEASE, 100.0)

    assert change is None
    assert state.causes == (FULL,)


def test_another_cause_is_reported_and_a_repeated_one_is_not():
    state, _ = failed(StoreState(), StoreLoop.ALERTS, FULL, 0.0)
    state, other = failed(state, StoreLoop.LEASE, AWAY, 1.0)
    state, again = failed(state, StoreLoop.ALERTS, FULL, 2.0)

    assert (other, again) == (HealthChange.OTHER_CAUSE, None)
    assert state.causes == (FULL, AWAY)


def test_only_an_accepted_heartbeat_shows_that_writes_are_taken():
    read, _ = worked(StoreState(), StoreLoop.RECORDS, 0.0)
    wrote, _ = worked(read, StoreLoop.HEARTBEAT, 0.0)

    assert (read.written, wrote.written) == (False, True)


ATTEMPTS = st.lists(
    st.tuples(st.sampled_from(StoreLoop), st.none() | st.integers(0, 30), st.floats(0.0, 2.0)),
    max_size=200,
)


@given(ATTEMPTS)
def test_an_outage_is_a_bounded_number_of_reports(attempts):
    """For any order of failures and successes: lost and back alternate, with few causes."""
    state, now, reported = StoreState(), 0.0, []
    for activity, cause, pause in attempts:
        now += pause
        if cause is None:
            state, change = worked(state, activity, now)
        else:
            state, change = failed(state, activity, f"cause {cause}", now)
        reported += [] if change is None else [change]

    ends = [c for c in reported if c is not HealthChange.OTHER_CAUSE]
    assert ends == [HealthChange.LOST, HealthChange.BACK] * (len(ends) // 2) + [
        HealthChange.LOST
    ] * (len(ends) % 2)
    assert len(reported) <= (CAUSES_REPORTED + 1) * (len(ends) // 2 + 1)
    assert state.down == (len(ends) % 2 == 1)
