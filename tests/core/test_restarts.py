"""The pause before a launcher restarts a worker."""

from hypothesis import given
from hypothesis import strategies as st

from tmd.core.planning.restarts import LEAST_UNJOINED_S, LONGEST_S, pause_s


def test_each_pause_is_twice_as_long_up_to_a_bound() -> None:
    assert [pause_s(n, 1.0, joined=True) for n in range(7)] == [1, 2, 4, 8, 16, 30, 30]


@given(restarts=st.integers(0, 10**6), first=st.floats(0, 1000), joined=st.booleans())
def test_a_script_that_never_joins_is_not_tried_in_a_hot_loop(
    restarts: int, first: float, joined: bool
) -> None:
    """For any requested delay; a worker that was part of the job restarts as requested."""
    pause = pause_s(restarts, first, joined=joined)

    assert pause <= LONGEST_S
    assert pause >= (min(first, LONGEST_S) if joined else LEAST_UNJOINED_S)
