"""What the worker process tells of one look at the GPUs.

Named tuples: the worker has the standard library and the bindings alone.
"""

from __future__ import annotations

from typing import NamedTuple

NONE = 0
"""No recovery is asked for."""
IDLE = 0x1
"""Clocks event reason: nothing runs, so the link may have dropped to save power."""


class Gpu(NamedTuple):
    """One GPU. A fact that the driver does not give is ``None``; ``codes`` says why."""

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
    """The driver says: too many SRAM errors."""
    reasons: int | None = None
    """Bits of why the clocks are as they are."""
    temperature: int | None = None
    slowdown: int | None = None
    """Celsius; at the second the hardware slows down."""
    links: dict[int, bool] = {}
    """NVLink -> whether it is up; absent where the GPU has none."""
    link_errors: int | None = None
    """Replays and recoveries of all NVLinks together."""
    width: int | None = None
    max_width: int | None = None
    """PCIe lanes."""


class NvmlReport(NamedTuple):
    """One look at the host."""

    codes: dict[str, int] = {}
    """As in :class:`Gpu`, of the calls about no GPU."""
    gpus: tuple[Gpu, ...] = ()
    bound: tuple[str, ...] = ()
    """PCI addresses of what sysfs shows as GPUs held by the driver ``nvidia``."""
