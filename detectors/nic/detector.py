"""Network ports: down, dropped, flapping, gone, slow, or with errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

from tmd.plugin import Detector, DetectorConfig, DetectorContext, Severity, Signal, State

from .child import Request
from .counters import RULES
from .judge import NicFindings, NicRules
from .links import LinkLimits
from .probe import NicProbe
from .snapshot import ScopeReading

UNREADABLE = "nic.unreadable"
MISSES = 2
"""Polls without an answer before that is said."""
LONGEST_PAUSE = 8
"""So many times ``poll_s`` at most, while there is no answer: the probe bounds what it leaves."""
PATIENCE_S = 30.0
"""So long one reading may take, the start of the process that reads included."""
_LINKS = LinkLimits()


class NicConfig(DetectorConfig, frozen=True, forbid_unknown_fields=True):
    poll_s: float = 5.0
    """Time between two readings."""
    interfaces: tuple[str, ...] = ()
    """Shell patterns of ports (``eth1``, ``mlx5_*/1``): these alone are watched, and a finding
    counts in full. Empty: all physical ports but those of the default route."""
    exclude: tuple[str, ...] = ()
    """Ports that are not watched."""
    no_counters: tuple[str, ...] = ()
    """Ports whose counters are not read: on restricted functions that floods the kernel log."""
    expect: tuple[str, ...] = ()
    """Names of ports that must be there and up. Others are expected once they have been up."""
    down_hold_s: float = _LINKS.down_hold_s
    """A port is down, or gone, after so long."""
    drop_s: float = _LINKS.drop_s
    """Down for so long without a break is a drop..."""
    drop_hold_s: float = _LINKS.drop_hold_s
    """...which holds so long after the port has come back."""
    flap_down_s: float = _LINKS.flap_down_s
    """Down for so long and back, ``flaps`` times in ``flap_window_s``, is flapping..."""
    flaps: int = _LINKS.flaps
    """Number of outages that count as flapping."""
    flap_window_s: float = _LINKS.flap_window_s
    """Window of time for ``flaps``."""
    flap_hold_s: float = _LINKS.flap_hold_s
    """...which holds so long after the last time; 0: until the daemon is started again."""
    quiet_s: float = 600.0
    """A counter that has been quiet for so long is well again."""
    sys_root: str = "/sys"
    """Where sysfs is mounted."""
    proc_root: str = "/proc"
    """Where procfs is mounted."""

    def rules(self) -> NicRules:
        """What the judge needs of it."""
        links = LinkLimits(
            down_hold_s=self.down_hold_s,
            drop_s=self.drop_s,
            drop_hold_s=self.drop_hold_s,
            flap_down_s=self.flap_down_s,
            flaps=self.flaps,
            flap_window_s=self.flap_window_s,
            flap_hold_s=self.flap_hold_s,
        )
        return NicRules(
            expect=self.expect, named=self.interfaces, quiet_s=self.quiet_s, links=links
        )

    def request(self) -> Request:
        """What the probe needs of it."""
        scope = ScopeReading(self.interfaces, self.exclude, self.no_counters)
        return Request(scope, tuple(RULES), self.sys_root, self.proc_root)


class NicDetector(Detector):
    name: ClassVar[str] = "nic"
    Config: ClassVar[type[DetectorConfig]] = NicConfig

    def supported(self) -> str | None:
        folder = Path("/sys/class/net")
        return None if folder.is_dir() else f"there is no {folder}: mount sysfs"

    async def watch(self, ctx: DetectorContext) -> AsyncIterator[Signal]:
        config = ctx.config
        assert isinstance(config, NicConfig)
        findings, probe, misses = NicFindings(config.rules()), NicProbe(config.request()), 0
        try:
            while True:
                snapshot = await probe.read(PATIENCE_S)
                if snapshot is None:
                    misses += 1
                    if misses == MISSES:
                        yield _unreadable(State.RAISED)
                else:
                    if misses >= MISSES:
                        yield _unreadable(State.CLEARED)
                    misses = 0
                    for signal in findings.observe(snapshot, ctx.now()):
                        yield signal
                await ctx.sleep(config.poll_s * min(2**misses, LONGEST_PAUSE))
        finally:
            await probe.close()


def _unreadable(state: State) -> Signal:
    return Signal(
        code=UNREADABLE,
        entity="host",
        severity=Severity.WARNING,
        state=state,
        message="the state of the network ports cannot be read: a driver does not answer",
    )
