"""State that survives a restart of the daemon: a dead port must not be taken for an unused one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tmd.plugin import Signal

from ..kept import KeptFile, KeptUntilBoot
from .judge import KnownPort, NicFindings, NicRules
from .snapshot import BondedPort, SeenPort, Snapshot

NOT_KEPT = "nic.ports_not_kept"
RISK = (
    "the ports that have been up cannot be saved, so a restart may take a dead port for an unused "
    "one"
)


class NicMemory(KeptUntilBoot, frozen=True):
    ports: tuple[KnownPort, ...] = ()
    """The ports that have been up since the host booted."""
    seen: dict[str, SeenPort] = {}
    """All ports of RDMA devices, by identity."""
    bonded: dict[str, BondedPort] = {}
    """Those in a bond."""


class RememberedPorts:
    """The findings about ports, and the file with those that have been up in this boot."""

    def __init__(self, rules: NicRules, file: Path) -> None:
        self._kept = KeptFile(file, NicMemory, NOT_KEPT, RISK)
        memory = self._kept.memory
        self.findings = NicFindings(rules, memory.ports, memory.seen, memory.bonded)

    def observe(self, snapshot: Snapshot, now: float) -> Iterator[Signal]:
        """Signals for what has changed."""
        yield from self.findings.observe(snapshot, now)
        found = self.findings
        memory = NicMemory(ports=found.known, seen=found.seen, bonded=found.bonded)
        yield from self._kept.keep(memory)
