"""Decides when a standby tries again to shadow a rank."""

from __future__ import annotations

import time

from tmd.core.planning.directives import ShadowRank

RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""First and longest pause between two attempts; it doubles after each failure."""


class Attempts:
    """Main thread only."""

    def __init__(self) -> None:
        self._settled: ShadowRank | None = None
        self._not_before = 0.0
        self._pause_s = RETRY_S

    def wants(self, directive: ShadowRank) -> bool:
        """Whether to try ``directive`` now: it has no verdict yet, and the pause is over."""
        return directive != self._settled and time.monotonic() >= self._not_before

    def begin(self) -> None:
        """Count an attempt; the next pause is longer."""
        self._not_before = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_RETRY_S)

    def repeat(self) -> None:
        """Continue the same attempt once this worker is built for another rank."""
        self._not_before = 0.0

    def caught_up(self) -> None:
        """Note a success: the next pause is the shortest."""
        self._pause_s = RETRY_S

    def settle(self, directive: ShadowRank) -> None:
        """Note a verdict on ``directive``; another directive is tried at once."""
        self._settled = directive
        self._not_before, self._pause_s = 0.0, RETRY_S
