"""The restarts of one slot of a launcher, and the pause before each."""

from __future__ import annotations

from msgspec import Struct, structs

LONGEST_S = 30.0
LEAST_UNJOINED_S = 1.0
"""Minimum for a worker that ended before it joined: its script may fail again at once, and each
import of torch takes seconds of a core."""
STEADY_S = 60.0
"""A worker that lived this long did not fail at its start."""


class Restarts(Struct, frozen=True):
    """The restarts so far."""

    done: int = 0
    """All of them. ``--max-restarts`` bounds it."""
    in_a_row: int = 0
    """Those since a worker last lived for :data:`STEADY_S`. The pause depends on it."""

    def ended(self, lived_s: float, *, joined: bool, steady_s: float = STEADY_S) -> Restarts:
        """A worker has failed after ``lived_s`` seconds.

        ``joined``: whether it had called ``join()``.
        """
        return structs.replace(self, in_a_row=0) if joined and lived_s >= steady_s else self

    def again(self) -> Restarts:
        """The slot is started once more."""
        return Restarts(self.done + 1, self.in_a_row + 1)

    def pause_s(self, first_s: float, *, joined: bool) -> float:
        """Seconds before the next start.

        ``joined``: whether the worker that ended had called ``join()``.
        """
        least = first_s if joined else max(first_s, LEAST_UNJOINED_S)
        # Bounded before the power: 2.0 ** 2000 overflows.
        return min(least * 2.0 ** min(self.in_a_row, 16), LONGEST_S)
