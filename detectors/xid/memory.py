"""State that survives a restart of the daemon: the position in the log, and what still holds."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from tmd.plugin import Signal


class Met(Struct, frozen=True):
    """One process met an XID on a GPU."""

    pci: str
    xid: int
    pid: int
    at: float
    """Seconds since boot."""


class XidMemory(Struct, frozen=True):
    boot: str = ""
    seq: int | None = None
    """Last judged record."""
    at: float | None = None
    """Its time, seconds since boot."""
    standing: tuple[Signal, ...] = ()
    """Findings that only a recovery clears."""
    met: tuple[Met, ...] = ()
    switches: tuple[Signal, ...] = ()
    """Findings about NVSwitches that only a new boot or an operator clears."""


def recall(file: Path, boot: str) -> XidMemory:
    """The state saved in this boot; empty after a new boot, which clears all findings."""
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=XidMemory)
    except (OSError, msgspec.DecodeError):
        return XidMemory(boot)
    return kept if kept.boot == boot else XidMemory(boot)


def keep(file: Path, memory: XidMemory) -> None:
    """Replace the file atomically.

    Raises:
        OSError: it cannot be written.
    """
    draft = file.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(memory))
    os.replace(draft, file)
