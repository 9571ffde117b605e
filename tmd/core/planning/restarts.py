"""When a launcher starts a worker again."""

from __future__ import annotations

LONGEST_S = 30.0
LEAST_UNJOINED_S = 1.0
"""Where ``--restart-delay`` asks for less: a script that fails before it joins fails again at once,
and importing torch takes seconds of a core each time."""


def pause_s(restarts: int, first_s: float, *, joined: bool) -> float:
    """Seconds before the next start of a slot that was started again ``restarts`` times.

    ``joined``: whether the worker that ended had called ``join()``.
    """
    least = first_s if joined else max(first_s, LEAST_UNJOINED_S)
    # Bounded before it is raised: 2.0 ** 2000 is no number.
    return min(least * 2.0 ** min(restarts, 16), LONGEST_S)
