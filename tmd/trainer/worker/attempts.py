"""When a standby tries again to shadow a rank."""

from __future__ import annotations

import time

from tmd.core.planning.directives import ShadowRank

RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
"""Pause between two attempts; doubled each time one comes to nothing."""


class Attempts:
    """For the main thread."""

    def __init__(self) -> None:
        self._settled: ShadowRank | None = None
        self._not_before = 0.0
        self._pause_s = RETRY_S

    def wants(self, directive: ShadowRank) -> bool:
        """Whether to try ``directive`` now: it is not settled, nor was tried a moment ago."""
        return directive != self._settled and time.monotonic() >= self._not_before

    def begin(self) -> None:
        """One more attempt; the next one waits longer."""
        self._not_before = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_RETRY_S)

    def repeat(self) -> None:
        """The same attempt goes on once this worker is built as another rank."""
        self._not_before = 0.0

    def caught_up(self) -> None:
        """This attempt came to something: the next one starts with the shortest pause."""
        self._pause_s = RETRY_S

    def settle(self, directive: ShadowRank) -> None:
        """``directive`` has its verdict; another directive is tried at once."""
        self._settled = directive
        self._not_before, self._pause_s = 0.0, RETRY_S
