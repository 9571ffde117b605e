"""The restarts of a slot, and the pause before each."""

from hypothesis import given
from hypothesis import strategies as st

from tmd.core.planning.restarts import LEAST_UNJOINED_S, LONGEST_S, STEADY_S, Restarts


def test_each_pause_is_twice_as_long_up_to_a_bound() -> None:
    pauses, restarts = [], Restarts()
    for _ in range(7):
        restarts = restarts.failed(STEADY_S - 1)
        pauses.append(restarts.pause_s(1.0, joined=True))
        restarts = restarts.restarted()

    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def test_a_worker_that_was_long_in_the_job_ends_the_row() -> None:
    """Hosts that lose a worker once a month do not fail in a row."""
    restarts = Restarts(done=6, in_a_row=6).failed(STEADY_S)

    assert restarts == Restarts(done=6, in_a_row=0)
    assert restarts.pause_s(1.0, joined=True) == 1.0
    assert restarts.restarted() == Restarts(done=7, in_a_row=1)


def test_a_script_that_fails_before_it_joins_ends_no_row() -> None:
    """However long it takes: imports may take minutes of a core."""
    restarts = Restarts(done=3, in_a_row=3)

    assert restarts.failed(None) == restarts


@given(in_a_row=st.integers(0, 10**6), first=st.floats(0, 1000), joined=st.booleans())
def test_a_script_that_never_joins_is_not_tried_in_a_hot_loop(
    in_a_row: int, first: float, joined: bool
) -> None:
    """For any requested delay; a worker that was part of the job restarts as requested."""
    pause = Restarts(in_a_row, in_a_row).pause_s(first, joined=joined)

    assert pause <= LONGEST_S
    assert pause >= (min(first, LONGEST_S) if joined else LEAST_UNJOINED_S)
