"""Queries the GPU driver through a process that may hang without harm."""

from __future__ import annotations

import ctypes
from collections.abc import AsyncIterator
from typing import Annotated, ClassVar

from msgspec import Meta

from tmd.plugin import Detector, DetectorConfig, DetectorContext, Positive, Signal, in_words

from ..children import Ended, Hung
from .memory import RememberedGpus
from .probe import nvml_worker

LIBRARY = "libnvidia-ml.so.1"
LONGEST_PAUSE = 8
"""Longest pause between attempts while the driver hangs, in units of the interval."""


class NvmlConfig(DetectorConfig, frozen=True, forbid_unknown_fields=True):
    interval_s: Positive = 10.0
    """Interval between readings of the GPUs."""
    deadline_s: Positive = 30.0
    """A reading that takes longer means that the driver hangs."""
    gpus: Annotated[int, Meta(ge=0)] = 0
    """Number of GPUs this host should have; 0: as many as sysfs shows."""
    sysfs: str = "/sys"
    """Where sysfs is mounted."""


class NvmlDetector(Detector):
    name: ClassVar[str] = "nvml"
    Config: ClassVar[type[DetectorConfig]] = NvmlConfig
    says_looked: ClassVar[bool] = True

    def __init__(self) -> None:
        self._gpus: RememberedGpus | None = None

    def supported(self) -> str | None:
        # Loading the library does not contact the driver; nvmlInit would.
        try:
            ctypes.CDLL(LIBRARY)
        except OSError:
            return f"there is no {LIBRARY}: the NVIDIA driver is not installed"
        return None

    def declared_healthy(self, code: str) -> None:
        if self._gpus is not None:
            self._gpus.judge.forget(code)

    async def watch(self, ctx: DetectorContext) -> AsyncIterator[Signal]:
        config = ctx.config
        assert isinstance(config, NvmlConfig)
        self._gpus = gpus = RememberedGpus(
            config.gpus, config.interval_s, ctx.state_dir / "gpus.json"
        )
        worker = nvml_worker(config.sysfs)
        hung = 0
        try:
            while True:
                try:
                    report = await worker.ask(config.deadline_s)
                    signals = [*gpus.judge.hung(0, ""), *gpus.observe(report, ctx.now())]
                    hung = 0
                    ctx.looked()
                except Hung as error:
                    hung += 1
                    signals = list(gpus.judge.hung(hung, in_words(error)))
                except Ended as error:
                    signals = list(gpus.judge.failed(in_words(error)))
                for signal in signals:
                    yield signal
                await ctx.sleep(config.interval_s * min(2 ** max(0, hung - 1), LONGEST_PAUSE))
        finally:
            await worker.close()
