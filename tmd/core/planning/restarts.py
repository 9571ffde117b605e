"""The restarts of one slot of a launcher, and the pause before each."""

from __future__ import annotations

from msgspec import Struct, structs

LONGEST_S = 30.0
LEAST_UNJOINED_S = 1.0
"""Minimum for a worker that ended before it joined: its script may fail again at once, and each
import of torch takes seconds of a core."""
STEADY_S = 60.0
"""A worker that failed only this long after it had joined ends a row of failures."""


class Restarts(Struct, frozen=True):
    """The restarts so far."""

    done: int = 0
    """All of them. ``--max-restarts`` bounds it."""
    in_a_row: int = 0
    """Those since a row of failures last ended. The pause depends on it."""

    def failed(self, joined_s: float | None, steady_s: float = STEADY_S) -> Restarts:
        """A worker has failed ``joined_s`` seconds after it had joined; ``None``: it never did."""
        ends = joined_s is not None and joined_s >= steady_s
        return structs.replace(self, in_a_row=0) if ends else self

    def restarted(self) -> Restarts:
        """The slot is started once more."""
        return Restarts(self.done + 1, self.in_a_row + 1)

    def pause_s(self, first_s: float, *, joined: bool) -> float:
        """Seconds before the next start.

        ``joined``: whether the worker that ended had called ``join()``.
        """
        least = first_s if joined else max(first_s, LEAST_UNJOINED_S)
        # Bounded before the power: 2.0 ** 2000 overflows.
        return min(least * 2.0 ** min(self.in_a_row, 16), LONGEST_S)
