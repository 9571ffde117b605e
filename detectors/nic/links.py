"""Decides when a port that was up is down, has dropped, or flaps. Pure; times are passed in.

*down* holds now. *drop* (a long outage) and *flap* (repeated outages) outlast the recovery, each
for its own time: a port that recovered thirty seconds ago is not sound yet.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from tmd.plugin import Severity

from .counters import NicFinding
from .snapshot import Port

DOWN, DROP, FLAP, SLOW = "down", "drop", "flap", "slow"


class LinkLimits(Struct, frozen=True):
    """All in seconds, except ``flaps``."""

    down_hold_s: float = 10.0
    drop_s: float = 240.0
    drop_hold_s: float = 600.0
    flap_down_s: float = 25.0
    flaps: int = 3
    flap_window_s: float = 43_200.0
    flap_hold_s: float = 43_200.0


class LinkHistory:
    """The link of one port. The first observed state of a port is never a fault by itself."""

    def __init__(self, limits: LinkLimits, *, was_up: bool) -> None:
        self._limits = limits
        self.was_up = was_up
        """Whether the port has been up since the host booted."""
        self._down_since: float | None = None
        self._unbroken: tuple[float, int | None] = (0.0, None)
        """Since when ``link_downed`` has had this value in the current outage."""
        self._dropped = False
        self._recovered_at = 0.0
        self._flaps: deque[float] = deque(maxlen=limits.flaps)
        self._flapping = False
        self._best_rate = 0.0
        self._slow_since: float | None = None

    def observe(self, port: Port, now: float, *, expected: bool) -> dict[str, NicFinding]:
        """The findings that hold after this reading. ``expected``: it should be up, even if it has
        not been."""
        up, link_downed = port.up, port.counters.get("link_downed")
        if up is True:
            self._came_up(now)
        elif not (expected or self.was_up):
            self._down_since = None
        elif up is False and self._down_since is None:
            self._down_since = now
            self._unbroken = (now, link_downed)
        elif link_downed is not None and link_downed != self._unbroken[1]:
            self._unbroken = (now, link_downed)  # it was up in between: not one long outage
        return {**self._outage(now), **self._past(now), **self._rate(up, port.rate_mb, now)}

    def _came_up(self, now: float) -> None:
        self.was_up = True
        if self._down_since is None:
            return
        if now - self._down_since >= self._limits.flap_down_s:
            self._flaps.append(now)
            often = len(self._flaps) == self._limits.flaps
            self._flapping |= often and now - self._flaps[0] < self._limits.flap_window_s
        self._down_since = None
        self._recovered_at = now

    def _outage(self, now: float) -> dict[str, NicFinding]:
        if self._down_since is None:
            return {}
        lasts = now - self._down_since
        self._dropped = self._dropped or now - self._unbroken[0] >= self._limits.drop_s
        if lasts < self._limits.down_hold_s:
            return {}
        return {DOWN: NicFinding(Severity.FATAL, f"down for {lasts:.0f} s")}

    def _past(self, now: float) -> dict[str, NicFinding]:
        found = {}
        limits = self._limits
        if self._down_since is None and now - self._recovered_at >= limits.drop_hold_s:
            self._dropped = False
        if self._dropped:
            text = f"was down for more than {limits.drop_s:.0f} s"
            found[DROP] = NicFinding(Severity.DEGRADED, text)
        if self._flapping and 0 < limits.flap_hold_s <= now - self._flaps[-1]:
            self._flapping = False
        if self._flapping:
            text = f"went down and recovered {limits.flaps} times or more"
            found[FLAP] = NicFinding(Severity.DEGRADED, text)
        return found

    def _rate(self, up: bool | None, rate_mb: float | None, now: float) -> dict[str, NicFinding]:
        if up is not True or rate_mb is None:
            return {}
        self._best_rate = max(self._best_rate, rate_mb)
        if rate_mb >= self._best_rate:
            self._slow_since = None
            return {}
        if self._slow_since is None:
            self._slow_since = now
        if now - self._slow_since < self._limits.down_hold_s:
            return {}
        text = f"{rate_mb:.0f} Mb/s, down from {self._best_rate:.0f}"
        return {SLOW: NicFinding(Severity.WARNING, text)}
