"""A worker's report of its compute time compared with its peer group."""

from __future__ import annotations

from msgspec import Struct


class Pace(Struct, frozen=True, gc=False):
    """Compute time is the time of a step without waits for others. Reported every few steps."""

    step: int
    """Step after which it was measured; comparable across ranks."""
    busy_s: float
    """Median compute time of a step over the last window."""
    ratio: float = 1.0
    """Compute time divided by that of the other ranks of its peer group."""
    slow_since: int | None = None
    """Step since which it is slower than its peers and than usual; ``None``: it is not slow."""
    lost_s: float = 0.0
    """Seconds that all other ranks have waited for it since then, a lower bound."""
    group_slow: bool = False
    """The steps of all ranks have become slower, without a known cause."""
