"""State that survives a restart of the daemon: the position in the log, and what still holds."""

from __future__ import annotations

from msgspec import Struct

from tmd.plugin import Signal

from ..kept import KeptUntilBoot


class Met(Struct, frozen=True):
    """One process met an XID on a GPU."""

    pci: str
    xid: int
    pid: int
    at: float
    """Seconds since boot."""


class XidMemory(KeptUntilBoot, frozen=True):
    seq: int | None = None
    """Last judged record."""
    at: float | None = None
    """Its time, seconds since boot."""
    standing: tuple[Signal, ...] = ()
    """Findings that only a recovery clears."""
    met: tuple[Met, ...] = ()
    switches: tuple[Signal, ...] = ()
    """Findings about NVSwitches that only a new boot or an operator clears."""
