"""Whether groups that are built beside training keep training from going on.

A communicator that is built while kernels of another one run may wait for those kernels, while they
wait for the next operation, which in turn waits for the build (NCCL issues 195 and 1082).
"""

from __future__ import annotations

STALL_S, STALL_STEPS = 10.0, 3
"""A step that takes longer than both, while groups are built, counts as stalled."""


def is_stalled(idle_s: float, step_s: float) -> bool:
    """Whether a build should be given up.

    Args:
        idle_s: seconds since the latest commit, or since the build began.
        step_s: duration of a usual step.
    """
    return idle_s > max(STALL_S, STALL_STEPS * step_s)
