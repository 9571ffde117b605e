"""Network ports: down, dropped, flapping, gone, slow, or with errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import ClassVar

from tmd.plugin import (
    Count,
    Detector,
    DetectorConfig,
    DetectorContext,
    NotNegative,
    Positive,
    Signal,
)

from ..trouble import Trouble
from .child import ReaderArguments
from .counters import RULES
from .judge import NicRules
from .links import LinkLimits
from .memory import RememberedPorts
from .probe import NicProbe
from .snapshot import ScopeReading, SeenPort

UNREADABLE = "nic.unreadable"
HANGS = (
    "the state of the network ports cannot be read: the process that reads them does not start, or "
    "does not answer in time"
)
MISSES = 2
"""Consecutive polls without an answer before ``nic.unreadable`` is raised."""
LONGEST_PAUSE = 8
"""Longest pause while there is no answer, in units of ``poll_s``: each attempt may leave a stuck
process."""
PATIENCE_S = 30.0
"""Longest reading, including the start of its process."""
_LINKS = LinkLimits()


class NicConfig(DetectorConfig, frozen=True, forbid_unknown_fields=True):
    poll_s: Positive = 5.0
    """Time between two readings."""
    interfaces: tuple[str, ...] = ()
    """Shell patterns of ports (``eth1``, ``mlx5_*/1``): only these are watched. A pattern also
    matches the network interface of an RDMA port. If empty, all physical ports are watched except
    those of the default route, and an Ethernet port that ``expect`` does not name raises warnings
    at most."""
    exclude: tuple[str, ...] = ()
    """Ports that are not watched."""
    no_counters: tuple[str, ...] = ()
    """Ports whose counters are not read. On some virtual functions each reading logs an error."""
    expect: tuple[str, ...] = ()
    """Names of ports that must exist and must not be down (``eth1``; of RDMA devices
    ``mlx5_0/1`` or the name of its interface). They are watched whatever ``interfaces`` lists and
    the default route uses. A port in state INIT or ARMED is not reported. A port that is not listed
    is expected once it has been up."""
    down_hold_s: NotNegative = _LINKS.down_hold_s
    """A port is reported down, or gone, after this long."""
    drop_s: NotNegative = _LINKS.drop_s
    """An outage of at least this length is a drop."""
    drop_hold_s: NotNegative = _LINKS.drop_hold_s
    """The finding of a drop clears this long after the port has recovered."""
    flap_down_s: NotNegative = _LINKS.flap_down_s
    """An outage of at least this length counts towards flapping: ``flaps`` of them within
    ``flap_window_s``."""
    flaps: Count = _LINKS.flaps
    """Number of outages that count as flapping."""
    flap_window_s: Positive = _LINKS.flap_window_s
    """Window of time for ``flaps``."""
    flap_hold_s: NotNegative = _LINKS.flap_hold_s
    """The finding of flapping clears this long after the last outage; 0 keeps it until the daemon
    restarts."""
    quiet_s: Positive = 600.0
    """A counter's finding clears after the counter has stayed within its limits for this long."""
    sys_root: str = "/sys"
    """Where sysfs is mounted."""
    proc_root: str = "/proc"
    """Where procfs is mounted."""

    def rules(self) -> NicRules:
        """The settings that the judge needs."""
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

    def request(self, seen: Mapping[str, SeenPort]) -> ReaderArguments:
        """What the probe needs: the settings, and the interfaces of ports that were ``seen``."""
        scope = ScopeReading(self.interfaces, self.exclude, self.no_counters, self.expect)
        interfaces = {identity: port.interface for identity, port in seen.items()}
        return ReaderArguments(scope, tuple(RULES), self.sys_root, self.proc_root, interfaces)


class NicDetector(Detector):
    name: ClassVar[str] = "nic"
    Config: ClassVar[type[DetectorConfig]] = NicConfig
    says_looked: ClassVar[bool] = True

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._ports: RememberedPorts | None = None

    def supported(self) -> str | None:
        folder = Path("/sys/class/net")
        return None if folder.is_dir() else f"there is no {folder}: mount sysfs"

    def declared_healthy(self, code: str) -> None:
        if self._ports is not None:
            self._ports.findings.forget(code)

    async def watch(self, ctx: DetectorContext) -> AsyncIterator[Signal]:
        config = ctx.config
        assert isinstance(config, NicConfig)
        self._ports = ports = RememberedPorts(config.rules(), ctx.state_dir / "ports.json")
        probe = NicProbe(config.request(ports.findings.seen))
        misses, unreadable = 0, Trouble(UNREADABLE)
        try:
            while True:
                snapshot = await probe.read(self._patience_s)
                misses = misses + 1 if snapshot is None else 0
                for signal in unreadable.report(HANGS if misses >= MISSES else ""):
                    yield signal
                if snapshot is not None:
                    for signal in ports.observe(snapshot, ctx.now()):
                        yield signal
                    ctx.looked()
                await ctx.sleep(config.poll_s * min(2**misses, LONGEST_PAUSE))
        finally:
            await probe.close()
