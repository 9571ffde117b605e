"""The copy of a state, unit by unit: what was copied, and when the next unit may follow."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tmd.trainer.state.units import Units

WHOLE_S = 60.0
"""Time after which training waits for a whole copy only while bytes move at each look."""


class UnitCopy:
    """The sender's thread copies; the main thread may wait for the end.

    Args:
        bytes_per_s: rate at which units are copied while the rank trains.
        clock: monotonic seconds.
    """

    def __init__(self, units: Units, bytes_per_s: float, clock: Callable[[], float]) -> None:
        self._units, self._rate, self._clock = units, bytes_per_s, clock
        self.count = 0
        """How many units were copied, from the first one on."""
        self._moved = 0
        """Bytes of the link that the joiner's side has taken."""
        self._ready_at = 0.0
        self._complete = threading.Event()

    @property
    def complete(self) -> bool:
        return self.count == len(self._units)

    def begin(self) -> None:
        """Begin with the first unit."""
        self.count = 0
        self._complete.clear()

    def is_due(self, *, paced: bool) -> bool:
        """Whether the next unit may be copied now, at the rate if ``paced``."""
        return not self.complete and not (paced and self._clock() < self._ready_at)

    def copied(self, size: int) -> None:
        """The next unit, of ``size`` bytes, was copied."""
        self._ready_at = max(self._clock(), self._ready_at) + size / self._rate
        self.count += 1
        if self.complete:
            self._complete.set()

    def moved(self, size: int) -> None:
        """The joiner's side has taken ``size`` bytes."""
        self._moved += size

    def wait(self, stalled_s: float, look_s: float, over: Callable[[], bool]) -> bool:
        """Wait until the copy is complete, or ``over()`` is true. Returns false if no byte has
        moved for ``stalled_s``, or, after ``WHOLE_S``, since the last look."""
        seen, since = self._moved, self._clock()
        patience = since + WHOLE_S
        while not self.complete and not over():
            if self._moved != seen:
                seen, since = self._moved, self._clock()
            elif self._clock() > min(since + stalled_s, patience):
                return False
            self._complete.wait(look_s)
        return True
