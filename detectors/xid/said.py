"""What the listener tells. Named tuples: it has the standard library and the bindings alone."""

from __future__ import annotations

from typing import NamedTuple


class XidEvent(NamedTuple):
    """One line. An empty one: a wait is over and nothing had happened."""

    xid: int = 0
    pci: str = ""
    """``0000:3b:00.0``"""
    instance: str = ""
    """MIG: ``GPU-I:05``."""
    action: int | None = None
    """With XID 154: the recovery action (NVML field 230), which an event does not carry."""
    gpus: int = 0
    """How many will be heard of: the first line, and no other, says so."""
    deaf: tuple[str, ...] = ()
    """With it: the GPUs that will not, each with the reason."""
    ended: str = ""
    """Why the listener ends."""
