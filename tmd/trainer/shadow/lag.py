"""How far a shadow computes behind its source."""

from __future__ import annotations

import itertools
import statistics
from collections import deque

UNNOTICED_S = 0.02
"""A lag that is never too large, however short the steps."""


class EvaluationTime:
    """The time that a rank has spent in functions of ``session.repeatable()``, in which nothing
    is copied or compared."""

    def __init__(self) -> None:
        self._total = 0.0
        self._since: float | None = None

    def boundary(self, at: float, *, evaluates: bool) -> None:
        """At ``at`` (monotonic) the rank began a step, or such a function."""
        self._total = self.seconds(at)
        self._since = at if evaluates else None

    def seconds(self, now: float) -> float:
        """The sum at ``now``, with the function that still runs."""
        return self._total + (0.0 if self._since is None else now - self._since)


class Lag:
    """``share``: fraction of a step's duration that a shadow may lag and still be in step."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._boundaries: deque[float] = deque(maxlen=6)
        self.seconds = 0.0
        """Time from the source's latest step to the same step here."""

    def boundary(self, at: float) -> None:
        """The source began a step at ``at`` (monotonic)."""
        self._boundaries.append(at)

    @property
    def step_s(self) -> float:
        """Median duration of the source's latest steps; 0 if unknown."""
        times = list(self._boundaries)
        return statistics.median([b - a for a, b in itertools.pairwise(times)] or [0.0])

    def pace_s(self, now: float) -> float:
        """As :attr:`step_s`. While the first step still runs it is the time since its boundary, the
        least that the step can take."""
        if len(self._boundaries) == 1:
            return now - self._boundaries[0]
        return self.step_s

    @property
    def unnoticed(self) -> bool:
        """Whether the lag is negligible."""
        return self.seconds <= self._bound

    @property
    def late(self) -> bool:
        """Whether a shadow that was in step has fallen behind."""
        return self.seconds > 3 * self._bound

    @property
    def _bound(self) -> float:
        return max(self._share * self.step_s, UNNOTICED_S)
