"""The pause before a launcher restarts a worker."""

from __future__ import annotations

LONGEST_S = 30.0
LEAST_UNJOINED_S = 1.0
"""Minimum for a worker that ended before it joined: its script may fail again at once, and each
import of torch takes seconds of a core."""


def pause_s(restarts: int, first_s: float, *, joined: bool) -> float:
    """Seconds before the next start of a slot with ``restarts`` restarts.

    ``joined``: whether the worker that ended had called ``join()``.
    """
    least = first_s if joined else max(first_s, LEAST_UNJOINED_S)
    # Bounded before the power: 2.0 ** 2000 overflows.
    return min(least * 2.0 ** min(restarts, 16), LONGEST_S)
