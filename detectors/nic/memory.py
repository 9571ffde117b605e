"""State that survives a restart of the daemon: a dead port must not be taken for an unused one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tmd.plugin import Signal, os_reason

from ..kept import Kept, boot_id, keep, recall
from ..trouble import Trouble
from .judge import NicFindings, NicRules
from .snapshot import Snapshot

NOT_KEPT = "nic.ports_not_kept"


class NicMemory(Kept, frozen=True):
    were_up: tuple[str, ...] = ()
    """Identities of the ports that have been up since the host booted."""


class RememberedPorts:
    """The findings about ports, and the file with those that have been up in this boot."""

    def __init__(self, rules: NicRules, file: Path) -> None:
        self._file = file
        self._kept = recall(file, NicMemory, boot_id())
        self.findings = NicFindings(rules, self._kept.were_up)
        self._not_kept = Trouble(NOT_KEPT)

    def observe(self, snapshot: Snapshot, now: float) -> Iterator[Signal]:
        """Signals for what has changed."""
        yield from self.findings.observe(snapshot, now)
        memory = NicMemory(self._kept.boot, tuple(sorted(self.findings.were_up)))
        if memory == self._kept:
            return
        problem = ""
        try:
            keep(self._file, memory)
            self._kept = memory
        except OSError as error:
            problem = (
                "the ports that have been up cannot be saved, so a restart may take a dead port "
                f"for an unused one: {self._file}: {os_reason(error)}"
            )
        yield from self._not_kept.report(problem)
