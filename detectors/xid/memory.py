"""What must survive a restart of the daemon: how far the log was read, and what still holds."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from tmd.plugin import Signal


class Met(Struct, frozen=True):
    """A process met an XID on a GPU."""

    pci: str
    xid: int
    pid: int
    at: float
    """Seconds since boot."""


class XidMemory(Struct, frozen=True):
    boot: str = ""
    seq: int | None = None
    """Last record that was judged."""
    at: float | None = None
    """Its time, seconds since boot."""
    standing: tuple[Signal, ...] = ()
    """Findings that only a recovery ends."""
    met: tuple[Met, ...] = ()
    switches: tuple[Signal, ...] = ()
    """Findings about NVSwitches that only a new boot or an operator ends."""


def recall(file: Path, boot: str) -> XidMemory:
    """What was kept in this boot; nothing after a new boot, which ends all findings."""
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=XidMemory)
    except (OSError, msgspec.DecodeError):
        return XidMemory(boot)
    return kept if kept.boot == boot else XidMemory(boot)


def keep(file: Path, memory: XidMemory) -> None:
    """Replace the file at once: whoever reads it sees the old or the new one.

    Raises:
        OSError: it cannot be written.
    """
    draft = file.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(memory))
    os.replace(draft, file)
