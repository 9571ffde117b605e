"""What one look at the network ports of a host has found. Values only.

Named tuples: the process that reads has the standard library alone.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Medium(StrEnum):
    ETHERNET = "ethernet"
    INFINIBAND = "infiniband"
    ROCE = "roce"
    EFA = "efa"


class Port(NamedTuple):
    """One port at one moment."""

    name: str
    """``eth0``, or ``mlx5_0/1`` for port 1 of an RDMA device."""
    identity: str
    """Survives a renumbering of devices: GUID and port number where there is a GUID, else name."""
    medium: Medium
    up: bool | None = None
    """``None``: the state says neither (dormant, initialising, unknown)."""
    state: str = ""
    """The kernel's words for it."""
    rate_mb: float | None = None
    """Megabits per second, while up."""
    counters: dict[str, int] = {}
    nodes: tuple[str, ...] = ()
    """Character devices of the port (``uverbs0``, ``umad0``)."""
    near: tuple[str, ...] = ()
    """GPUs that are nearest by PCI tree, as ``pci:0000:3b:00.0``."""


class Snapshot(NamedTuple):
    ports: tuple[Port, ...] = ()


class ScopeReading(NamedTuple):
    """Which ports are looked at; all patterns are those of a shell (``mlx5_*``)."""

    interfaces: tuple[str, ...] = ()
    """Only these, whatever they are; empty: all physical ports but that of the default route."""
    exclude: tuple[str, ...] = ()
    no_counters: tuple[str, ...] = ()
    """Ports whose counters are never read."""
