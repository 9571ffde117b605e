"""When a build beside training counts as harm."""

from __future__ import annotations

import pytest

from tmd.core.worker.build_stall import STALL_S, STALL_STEPS, is_stalled


@pytest.mark.parametrize("step_s", [0.0, 0.1, STALL_S / STALL_STEPS])
def test_short_steps_may_take_ten_seconds(step_s: float) -> None:
    assert not is_stalled(STALL_S, step_s)
    assert is_stalled(STALL_S + 0.1, step_s)


def test_long_steps_may_take_three_times_as_long() -> None:
    assert not is_stalled(STALL_STEPS * 30.0, 30.0)
    assert is_stalled(STALL_STEPS * 30.0 + 0.1, 30.0)
