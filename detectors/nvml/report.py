"""The worker's report of one reading of the GPUs.

Named tuples: the worker uses the standard library and the bindings alone.
"""

from __future__ import annotations

from typing import NamedTuple

NONE = 0
"""No recovery is requested."""
IDLE = 0x1
"""Clocks event reason: the GPU is idle, so the link may have dropped to save power."""


class Gpu(NamedTuple):
    """One GPU. A fact that the driver does not provide is ``None``; ``codes`` has the reason."""

    pci: str
    """``0000:3b:00.0``"""
    uuid: str = ""
    codes: dict[str, int] = {}
    """NVML function -> return code, of the calls that failed."""
    recovery: int | None = None
    """Field 230, the driver's recovery action (driver 570 and newer)."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    uncorrected: int | None = None
    """Volatile uncorrectable ECC errors."""
    sram_threshold: bool | None = None
    """The driver reports too many SRAM errors."""
    reasons: int | None = None
    """Bits that give the reasons for the current clocks."""
    temperature: int | None = None
    """Degrees Celsius."""
    below_slowdown: int | None = None
    """Degrees left until the hardware slows the GPU down; negative when it is hotter than that."""
    links: dict[int, bool] = {}
    """NVLink -> whether it is up; absent where the GPU has none."""
    link_errors: int | None = None
    """Replays and recoveries of all NVLinks together."""
    width: int | None = None
    max_width: int | None = None
    """PCIe lanes."""


class NvmlReport(NamedTuple):
    """One reading of the host."""

    codes: dict[str, int] = {}
    """As in :class:`Gpu`, for calls that concern no GPU."""
    gpus: tuple[Gpu, ...] = ()
    bound: tuple[str, ...] = ()
    """PCI addresses of the GPUs that sysfs shows as bound to the driver ``nvidia``."""
