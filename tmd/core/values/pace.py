"""A worker's report of its compute time compared with its peer group."""

from __future__ import annotations

from msgspec import Struct


class Pace(Struct, frozen=True, gc=False):
    """How fast a worker computes; reported every few steps.

    Compute time is the time of a step minus the time spent waiting for other ranks.
    """

    step: int
    """Step after which the pace was measured. Its number means the same step on all ranks."""
    busy_s: float
    """Median compute time of a step over the last window."""
    ratio: float = 1.0
    """Compute time divided by that of the other ranks of its peer group."""
    slow_since: int | None = None
    """Step since which it has been slower than its peers and than usual; ``None``: not slow."""
    lost_s: float = 0.0
    """Seconds, at least, for which the other ranks have waited for it since ``slow_since``."""
    group_slow: bool = False
    """Whether the steps of all ranks have become slower, without a known cause."""
