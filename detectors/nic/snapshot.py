"""The values of one snapshot of a host's network ports.

Named tuples: the reading process uses the standard library alone.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from enum import StrEnum
from typing import NamedTuple, TypeVar

ABSENT = 256
"""Most ports that are remembered although nothing else needs them: devices come and go with the
containers of a host, and an argument of a process may have 128 KiB."""

V = TypeVar("V")


class Medium(StrEnum):
    ETHERNET = "ethernet"
    INFINIBAND = "infiniband"
    ROCE = "roce"
    EFA = "efa"
    UNKNOWN = ""
    """Of a port that has not been seen."""


class Port(NamedTuple):
    """One port at one moment."""

    name: str
    """``eth0``, or ``mlx5_0/1`` for port 1 of an RDMA device."""
    identity: str
    """Survives a renumbering of devices: GUID and port number where there is a GUID, else name."""
    medium: Medium
    up: bool | None = None
    """``None``: the state is neither up nor down (dormant, initialising, unknown)."""
    state: str = ""
    """The state as the kernel names it."""
    rate_mb: float | None = None
    """Megabits per second, while up."""
    counters: dict[str, int] = {}
    nodes: tuple[str, ...] = ()
    """Character devices of the port (``uverbs0``, ``umad0``)."""
    interface: str = ""
    """Of the port of an RDMA device, if it has one, or its last one."""
    card: str = ""
    """PCI address without the function, as ``0000:3b:00``; empty if there is none."""
    instance: int = 0
    """Of an RDMA device: another number once the kernel has made the device anew."""
    near: tuple[str, ...] = ()
    """The nearest GPUs in the PCI tree, as ``pci:0000:3b:00.0``."""

    @property
    def names(self) -> tuple[str, ...]:
        """What patterns of the configuration are compared with."""
        return (self.name, self.interface) if self.interface else (self.name,)


class SeenPort(NamedTuple):
    """What is remembered of the port of an RDMA device, in scope or not."""

    interface: str = ""
    """Its last one: it may have moved into the network of a container."""
    instance: int = 0
    """See :class:`Port`."""


class BondedPort(NamedTuple):
    """How long the port of an RDMA device has been in a bond with a device of its own."""

    master: str
    """The bond of its interface, or the like."""
    looks: int
    """Consecutive snapshots in which it was in this bond, up to a limit."""


class Snapshot(NamedTuple):
    ports: tuple[Port, ...] = ()
    outside: tuple[Port, ...] = ()
    """Ports that are there, but out of scope, or part of the port of an RDMA device; without their
    state and counters."""
    masters: dict[str, str] = {}
    """Interface -> the bond, or the like, that it belongs to."""

    @property
    def there(self) -> tuple[Port, ...]:
        """All ports."""
        return (*self.ports, *self.outside)


class ScopeReading(NamedTuple):
    """The ports to read; all patterns are shell patterns (``mlx5_*``) of their names or, for a port
    of an RDMA device, of its interface's name."""

    interfaces: tuple[str, ...] = ()
    """Only these ports; empty: all physical ports except that of the default route."""
    exclude: tuple[str, ...] = ()
    no_counters: tuple[str, ...] = ()
    """Ports whose counters are never read."""
    expect: tuple[str, ...] = ()
    """Names of ports that are read whatever their kind and route; no patterns."""


def absent(known: Mapping[str, V], needed: Container[str]) -> dict[str, V]:
    """The newest entries of ``known`` that are not ``needed``, at most :data:`ABSENT`."""
    others = [each for each in known.items() if each[0] not in needed]
    return dict(others[-ABSENT:])
