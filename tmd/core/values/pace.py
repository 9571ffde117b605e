"""How fast a worker computes compared with its peer group, as it reports."""

from __future__ import annotations

from msgspec import Struct


class Pace(Struct, frozen=True):
    """Compute time is the time of a step without waiting for others. Told every few steps."""

    step: int
    """After which it was taken; comparable across ranks."""
    busy_s: float
    """Median compute time of a step over the last window."""
    ratio: float = 1.0
    """How many times as long as the others' of its peer group."""
    slow_since: int | None = None
    """Step at which it became slower than the others and itself before; ``None``: it is not."""
    lost_s: float = 0.0
    """What all have waited for it since then: seconds of the job, a lower bound."""
    group_slow: bool = False
    """The steps of all ranks have become slower, whichever rank causes it."""
