"""The listener's message. A named tuple: it uses the standard library and the bindings alone."""

from __future__ import annotations

from typing import NamedTuple


class XidEvent(NamedTuple):
    """One line. An empty one: a wait ended without an event."""

    xid: int = 0
    pci: str = ""
    """``0000:3b:00.0``"""
    instance: str = ""
    """MIG: ``GPU-I:05``."""
    action: int | None = None
    """With XID 154: the recovery action (NVML field 230), which an event does not carry."""
    gpus: int = 0
    """Number of GPUs whose events are received: only the first line has it."""
    deaf: tuple[str, ...] = ()
    """GPUs whose events are not received, each with the reason. Only the first line has it."""
    ended: str = ""
    """Why the listener ends."""
