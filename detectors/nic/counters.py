"""Decides when error counters mean that a port is sick. Pure; times are passed in.

A rule limits how much a counter may grow inside a window. A finding clears after the counter has
been quiet for a while, never at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from msgspec import Struct

from tmd.plugin import Severity

MINUTE, HOUR = 60.0, 3600.0
SECONDS = 10.0
"""The time over which "per second" is measured, so that one burst is not a rate."""


class Rule(Struct, frozen=True):
    """More than ``limit`` within ``window_s`` is a finding."""

    limit: int
    window_s: float
    severity: Severity


class NicFinding(Struct, frozen=True):
    severity: Severity
    message: str


def _per_second(rate: int, severity: Severity) -> Rule:
    return Rule(int(rate * SECONDS), SECONDS, severity)


_ANY = Rule(0, MINUTE, Severity.DEGRADED)

RULES: dict[str, tuple[Rule, ...]] = {
    "link_downed": (
        Rule(0, 10 * MINUTE, Severity.WARNING),
        Rule(1, 10 * MINUTE, Severity.FATAL),
    ),
    "excessive_buffer_overrun_errors": (_ANY,),
    "local_link_integrity_errors": (_ANY,),
    "rnr_nak_retry_err": (_per_second(1, Severity.WARNING),),
    "symbol_error": (_per_second(10, Severity.WARNING), Rule(120, HOUR, Severity.DEGRADED)),
    "link_error_recovery": (Rule(5, MINUTE, Severity.WARNING),),
    "port_rcv_errors": (_per_second(10, Severity.WARNING),),
    "local_ack_timeout_err": (_per_second(1, Severity.WARNING),),
    "roce_slow_restart": (_per_second(10, Severity.WARNING),),
    "port_xmit_discards": (_per_second(100, Severity.WARNING),),
    "carrier_changes": (Rule(2, 10 * MINUTE, Severity.WARNING),),
    # Counters of EFA devices.
    "no_completion_cmds": (_ANY,),
    "rx_drops": (_per_second(100, Severity.WARNING),),
    "cmds_err": (Rule(10, MINUTE, Severity.WARNING),),
}
"""Counter -> rules in order of severity. The limits are NVSentinel's defaults, softened where a
finding may move a rank: only a link that went down twice is FATAL."""

REPEATING = ("port_rcv_errors", "local_ack_timeout_err", "roce_slow_restart", "port_xmit_discards")
STRIKES, STRIKES_WINDOW_S, STRIKES_APART_S = 3, HOUR, 5 * MINUTE
"""Three bursts within an hour on one port are more than transient congestion. Strikes are this far
apart at least, and a burst is one strike however long it lasts."""
REPEATED = "errors_repeated"

PEGS = {
    "link_downed": 255,
    "link_error_recovery": 255,
    "local_link_integrity_errors": 15,
    "excessive_buffer_overrun_errors": 15,
    "symbol_error": 65535,
    "port_rcv_errors": 65535,
    "port_xmit_discards": 65535,
}
"""Maxima of the counters of the InfiniBand PortCounters attribute: they saturate, never wrap."""
SATURATED = "saturated"


class _Growth(Struct, frozen=True):
    at: float
    amount: int
    span_s: float
    """Time between the two readings."""


class CounterHistory:
    """Turns the readings of one port into the findings that hold."""

    def __init__(self, quiet_s: float) -> None:
        self._quiet_s = quiet_s
        self._last: dict[str, tuple[int, float]] = {}
        self._growths: dict[str, deque[_Growth]] = {name: deque() for name in RULES}
        self._held: dict[str, tuple[NicFinding, float]] = {}
        """name -> the finding, and when it was last seen."""
        self._strikes: deque[float] = deque(maxlen=STRIKES)
        self._bursting: set[str] = set()
        """Counters that were above a limit at their last reading."""

    def observe(self, counters: Mapping[str, int], now: float) -> dict[str, NicFinding]:
        """The findings that hold after this reading, by name of the counter.

        A missing counter was not readable: its next reading covers the longer time.
        """
        for name in RULES.keys() & counters.keys():
            self._read(name, counters[name], now)
            found = self._exceeded(name, now)
            if found is None:
                self._bursting.discard(name)
            else:
                self._hold(name, found, now)
                self._strike(name, now)
                self._bursting.add(name)
        self._held = {n: h for n, h in self._held.items() if now - h[1] < self._quiet_s}
        findings = {name: finding for name, (finding, _) in self._held.items()}
        pegged = sorted(name for name, value in counters.items() if PEGS.get(name) == value)
        if pegged:
            text = f"{', '.join(pegged)} at the highest value: further errors cannot be seen"
            findings[SATURATED] = NicFinding(Severity.INFO, text)
        return findings

    def _read(self, name: str, value: int, now: float) -> None:
        before = self._last.get(name)
        self._last[name] = (value, now)
        # A smaller value is a reset. When it counted since then is unknown.
        if before is not None and value > before[0]:
            growth = _Growth(now, value - before[0], now - before[1])
            self._growths[name].append(growth)
        longest = max(rule.window_s for rule in RULES[name])
        growths = self._growths[name]
        while growths and now - growths[0].at >= longest:
            growths.popleft()

    def _exceeded(self, name: str, now: float) -> NicFinding | None:
        found = None
        for rule in RULES[name]:
            amount = _within(self._growths[name], rule.window_s, now)
            if amount > rule.limit:
                text = f"{name} grew by {amount:.0f} in {rule.window_s:.0f} s"
                found = NicFinding(rule.severity, text)
        return found

    def _hold(self, name: str, found: NicFinding, now: float) -> None:
        held = self._held.get(name)
        if held is not None and held[0].severity.grade > found.severity.grade:
            found = held[0]
        self._held[name] = (found, now)

    def _strike(self, name: str, now: float) -> None:
        if name not in REPEATING:
            return
        begins = name not in self._bursting
        if begins and (not self._strikes or now - self._strikes[-1] >= STRIKES_APART_S):
            self._strikes.append(now)
        if len(self._strikes) == STRIKES and now - self._strikes[0] < STRIKES_WINDOW_S:
            text = f"errors at a high rate {STRIKES} times within an hour, last {name}"
            self._hold(REPEATED, NicFinding(Severity.DEGRADED, text), now)


def _within(growths: deque[_Growth], window_s: float, now: float) -> float:
    """Growth inside the window; a reading that spans more counts in proportion."""
    return sum(
        growth.amount * min(1.0, window_s / growth.span_s) if growth.span_s > 0 else growth.amount
        for growth in growths
        if now - growth.at < window_s
    )
