"""State that survives a restart of the daemon: a lost GPU must not be taken for an unused one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tmd.plugin import Signal

from ..kept import KeptFile, KeptUntilBoot
from .judge import Judge, KnownGpu
from .report import NvmlReport

NOT_KEPT = "nvml.gpus_not_kept"
RISK = (
    "the list of GPUs that the driver has shown cannot be saved, so the daemon may overlook a lost "
    "GPU or NVLink, or memory errors, after its next start"
)


class NvmlMemory(KeptUntilBoot, frozen=True):
    gpus: tuple[KnownGpu, ...] = ()
    """The GPUs that NVML has shown since the host booted."""


class RememberedGpus:
    """The judge of the GPUs, and the file with what it knows of them in this boot."""

    def __init__(self, gpus: int, interval_s: float, file: Path) -> None:
        """``gpus``: the expected number, 0 if unknown. ``interval_s``: between two readings."""
        self._kept = KeptFile(file, NvmlMemory, NOT_KEPT, RISK)
        self.judge = Judge(gpus, interval_s, self._kept.memory.gpus)

    def observe(self, report: NvmlReport, now: float) -> Iterator[Signal]:
        """Signals for what has changed."""
        yield from self.judge.observe(report, now)
        yield from self._kept.keep(NvmlMemory(gpus=self.judge.known))
