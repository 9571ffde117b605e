"""Texts for NVML's numbers (NVML API reference: nvmlReturn_t, recovery actions, clocks events)."""

from __future__ import annotations

from collections.abc import Mapping

from tmd.plugin import Severity

DRIVER_NOT_LOADED = 9
UNKNOWN = 999
"""Believed only if it persists, and only of the calls in ``BASIC``."""
BROKEN = {
    DRIVER_NOT_LOADED: "the driver is not loaded",
    11: "the GPU has no interrupts",
    14: "the InfoROM is corrupted",
    15: "the GPU is lost; reboot",
    16: "the GPU must be reset",
    UNKNOWN: "the driver fails with an unknown error",
}
"""Return codes that mean a fault. Others mean that a fact is not available."""
OPEN = "nvmlDeviceGetHandleByIndex"
"""The call without which nothing of a GPU can be read."""
BASIC = frozenset(
    {
        "nvmlInit",
        "nvmlDeviceGetCount",
        OPEN,
        "nvmlDeviceGetPciInfo",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetTemperature",
    }
)
"""Calls that every sound GPU answers. Another call may return ``UNKNOWN`` for a fact that a GPU or
driver merely does not provide."""

ACTIONS = {
    1: (Severity.FATAL, "a GPU reset"),
    2: (Severity.FATAL, "a reboot of the host"),
    3: (Severity.DEGRADED, "a drain of peer-to-peer traffic"),
    4: (Severity.DEGRADED, "a drain and a GPU reset"),
    5: (Severity.FATAL, "a recovery of the IMEX domain"),
    6: (Severity.FATAL, "a bus reset"),
    7: (Severity.FATAL, "a reboot of the system"),
}
"""Recovery action (field 230) -> its severity and the recovery that is requested."""

_REASONS = {0x8: "hardware slow-down", 0x40: "heat", 0x80: "power brake"}
"""Clocks event reasons that mean a hardware slow-down. A change of clocks may set 0x8 for a moment;
a software power cap is normal."""
SLOWED = 0x8 | 0x40 | 0x80


def fault(codes: Mapping[str, int]) -> int | None:
    """The return code that means a fault, if there is one. ``codes``: NVML function -> code."""
    found = (c for call, c in codes.items() if c in BROKEN and (c != UNKNOWN or call in BASIC))
    return next(found, None)


def slowed(reasons: int) -> str:
    return ", ".join(word for bit, word in _REASONS.items() if reasons & bit)
