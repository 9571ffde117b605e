"""Whether the inner groups of this worker can be built beside training, as attempts have shown."""

from __future__ import annotations

from math import inf


class BesideBuilds:
    """After a failure moves build at the switch: one, and twice as many after each further failure.

    A failure may have had another cause, such as a long evaluation. If it had not, each attempt
    costs the job a move that is dropped.
    """

    def __init__(self) -> None:
        self.obstacle = ""
        """Why the next move builds at the switch; empty if it builds beside training."""
        self._failures = 0
        self._left = 0.0
        """Moves until it is tried again."""

    def never(self, why: str) -> None:
        """Build no group beside training."""
        self.obstacle, self._left = why, inf

    def failed(self, why: str) -> None:
        """A group could not be built beside training, or kept training from going on (any
        thread)."""
        if not self.obstacle:
            self._failures += 1
            self.obstacle, self._left = why, 2.0 ** (self._failures - 1)

    def switched(self) -> None:
        """A move has come to its switch, at which groups are built."""
        self._left -= 1
        if self._left <= 0:
            self.obstacle = ""
