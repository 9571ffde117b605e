"""When a build beside training counts as harm."""

from __future__ import annotations

import pytest

from tmd.core.worker.build_stall import BLOCK_FACTOR, STALL_S, STALL_STEPS, Stall, stall


@pytest.mark.parametrize("step_s", [0.0, 0.1, STALL_S / STALL_STEPS])
def test_short_steps_may_take_ten_seconds(step_s: float) -> None:
    assert stall(STALL_S, 0.0, step_s) is Stall.NONE
    assert stall(STALL_S + 0.1, 0.0, step_s) is Stall.STALLED


def test_long_steps_may_take_three_times_as_long() -> None:
    assert stall(STALL_STEPS * 30.0, 0.0, 30.0) is Stall.NONE
    assert stall(STALL_STEPS * 30.0 + 0.1, 0.0, 30.0) is Stall.STALLED


def test_operations_that_never_end_break_the_step() -> None:
    """Much later than the build is given up, which may end them."""
    late = BLOCK_FACTOR * STALL_S

    assert stall(late, late, 0.1) is Stall.STALLED
    assert stall(late, late + 0.1, 0.1) is Stall.BLOCKED


def test_a_long_computation_breaks_nothing() -> None:
    """No operation runs in it."""
    assert stall(1000.0, 0.0, 0.1) is Stall.STALLED
