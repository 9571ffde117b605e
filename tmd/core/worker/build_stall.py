"""Whether groups that are built beside training keep training from going on.

A communicator that is built while kernels of another one run may wait for those kernels, while they
wait for the next operation, which in turn waits for the build (NCCL issues 195 and 1082).
"""

from __future__ import annotations

from enum import Enum, auto

STALL_S, STALL_STEPS = 10.0, 3
"""A step that takes longer than both, while groups are built, counts as stalled."""
BLOCK_FACTOR = 3
"""If operations wait this many times longer, the step is broken, which aborts them."""


class Stall(Enum):
    """What a build does to training."""

    NONE = auto()
    STALLED = auto()
    """No step is committed: the build is given up."""
    BLOCKED = auto()
    """Operations wait that may never end: the step is broken, which ends them."""


def stall(idle_s: float, blocked_s: float, step_s: float) -> Stall:
    """Judge a build.

    Args:
        idle_s: seconds since the latest commit, or since the build began.
        blocked_s: seconds for which operations have been running and no other one was called.
        step_s: duration of a usual step.
    """
    limit = max(STALL_S, STALL_STEPS * step_s)
    if blocked_s > BLOCK_FACTOR * limit:
        return Stall.BLOCKED
    return Stall.STALLED if idle_s > limit else Stall.NONE
