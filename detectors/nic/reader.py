"""Reads the network ports of this host from sysfs.

It only reads. A missing file yields no value. A counter file that once returned EINVAL is never
read again, since on restricted functions each reading makes the driver write to the kernel log.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from .snapshot import Medium, Port, ScopeReading, Snapshot
from .topology import gpus, nearest

ETHERNET_TYPE = "1"
UP_STATES = {"up": True, "down": False, "lowerlayerdown": False, "notpresent": False}
"""Values of operstate that say whether a port is up (Documentation/networking/operstates)."""
PORT_UP = {"4": True, "1": False}
"""IB port states: ACTIVE and DOWN. INIT and ARMED wait for the subnet manager: not a fault."""
PHYS_DISABLED = "3"
EFA_DRIVER = "efa"


class NicReader:
    """Takes snapshots; remembers unreadable files."""

    def __init__(
        self,
        scope: ScopeReading,
        counters: Iterable[str],
        sys_root: str = "/sys",
        proc_root: str = "/proc",
        interfaces: Mapping[str, str] | None = None,
        in_scope: Iterable[str] = (),
    ) -> None:
        """``interfaces``: of ports of RDMA devices, by identity, as they were last known.
        ``in_scope``: identities of ports that stay in scope if the default route moves to them."""
        self.refused: set[str] = set()
        self._scope = scope
        self._counters = tuple(counters)
        self._net = f"{sys_root}/class/net"
        self._rdma = f"{sys_root}/class/infiniband"
        self._sys = sys_root
        self._proc = proc_root
        self._gpus = gpus(sys_root)
        self._in_scope = dict.fromkeys(in_scope, True)
        self._interfaces = dict(interfaces or {})

    def read(self) -> Snapshot:
        """All ports in scope, RDMA ports first. An RDMA port includes its interface."""
        taken: set[str] = set()
        outside: list[Port] = []
        masters: dict[str, str] = {}
        default = _default_route(self._proc, self._net)
        ports = list(self._rdma_ports(default, taken, outside))
        # A second interface of a port, such as one of another partition, may be expected, too.
        taken -= {*self._scope.expect} - {port.interface for port in (*ports, *outside)}
        for interface in _names(self._net):
            if master := _link(f"{self._net}/{interface}/master"):
                masters[interface] = master
            if (
                interface not in taken
                and self._wanted(Port(interface, interface, Medium.ETHERNET), default)
                and (self._is_named((interface,)) or self._is_physical(f"{self._net}/{interface}"))
            ):
                ports.append(self._ethernet(interface))
            elif os.path.exists(f"{self._net}/{interface}"):  # it may have vanished meanwhile
                outside.append(Port(interface, interface, Medium.ETHERNET))
        return Snapshot(tuple(ports), tuple(outside), masters)

    def _is_physical(self, folder: str) -> bool:
        device = f"{folder}/device"
        plain = _text(f"{folder}/type") == ETHERNET_TYPE
        return plain and os.path.exists(device) and not _is_virtual_function(device)

    def _wanted(self, port: Port, default: set[str]) -> bool:
        """Whether ``port`` is in scope. ``default``: the interfaces of default routes."""
        # Another port may have the last interface of this one now.
        last = self._interfaces.get(port.identity, "")
        if _matches((*port.names, last), self._scope.exclude):
            return False
        if self._is_named(port.names) or self._scope.interfaces:
            return self._is_named(port.names)
        # Decided once: a moved route must not make a port seem gone or new.
        return self._in_scope.setdefault(port.identity, not default.intersection(port.names))

    def _is_named(self, names: Sequence[str]) -> bool:
        """Whether the configuration names the port to be watched."""
        return _matches(names, self._scope.interfaces) or self._is_expected(names)

    def _is_expected(self, names: Sequence[str]) -> bool:
        return any(name in self._scope.expect for name in names)

    # --- Ethernet -----------------------------------------------------------------------------

    def _ethernet(self, name: str) -> Port:
        folder = f"{self._net}/{name}"
        state = _text(f"{folder}/operstate")
        return Port(
            name=name,
            identity=name,
            medium=Medium.ETHERNET,
            up=UP_STATES.get(state),
            state=state,
            rate_mb=_speed(folder) if state == "up" else None,
            counters=self._values((name,), [folder]),
            near=self._near(f"{folder}/device"),
        )

    # --- InfiniBand, RoCE, EFA ----------------------------------------------------------------

    def _rdma_ports(
        self, default: set[str], taken: set[str], outside: list[Port]
    ) -> Iterator[Port]:
        """Ports in scope; adds others to ``outside``, and to ``taken`` the interfaces that belong
        to any RDMA device."""
        nodes = self._nodes()
        for device in _names(self._rdma):
            folder = f"{self._rdma}/{device}"
            interfaces = _names(f"{folder}/device/net")
            taken.update(interfaces)
            is_virtual = _is_virtual_function(f"{folder}/device")
            for number in _names(f"{folder}/ports"):
                port = self._placed(device, number, interfaces)
                if is_virtual and not self._is_expected(port.names):
                    # Its name alone: it may have been expected before, and there may be hundreds.
                    outside.append(Port(port.name, port.identity, port.medium))
                elif self._wanted(port, default):
                    yield self._rdma_port(port, device, number, nodes.get(port.name, ()))
                else:
                    outside.append(port)

    def _placed(self, device: str, number: str, interfaces: list[str]) -> Port:
        """Port ``number`` of ``device``, without its state and counters."""
        folder, name = f"{self._rdma}/{device}", f"{device}/{number}"
        identity = _identity(folder, name, number)
        return Port(
            name=name,
            identity=identity,
            medium=_medium(folder, f"{folder}/ports/{number}"),
            interface=self._interface_of(identity, folder, interfaces, number),
            card=_card(f"{folder}/device"),
            instance=_instance(folder),
        )

    def _rdma_port(self, placed: Port, device: str, number: str, nodes: tuple[str, ...]) -> Port:
        """``placed`` with its state and counters."""
        folder, interface = f"{self._rdma}/{device}", placed.interface
        port = f"{folder}/ports/{number}"
        state, phys = _text(f"{port}/state"), _text(f"{port}/phys_state")
        up = PORT_UP.get(_number(state))
        if _number(phys) == PHYS_DISABLED:
            up = False
        if placed.medium is Medium.EFA and interface:
            # EFA always reports ACTIVE: only the interface shows the state. Without one, a device
            # that is there counts as up, so that its disappearance is a finding.
            state, phys = _text(f"{self._net}/{interface}/operstate"), ""
            up = UP_STATES.get(state)
        places = [f"{port}/counters", f"{port}/hw_counters", f"{folder}/hw_counters"]
        if interface:
            places.append(f"{self._net}/{interface}")
        return placed._replace(
            up=up,
            state=", ".join(filter(None, (state, phys))),
            rate_mb=_ib_rate(_text(f"{port}/rate")) if up else None,
            counters=self._values(placed.names, places),
            nodes=nodes,
            near=self._near(f"{folder}/device"),
        )

    def _interface_of(self, identity: str, folder: str, interfaces: list[str], number: str) -> str:
        """The interface of port ``number``, or its last one if that has vanished, as into the
        network of a container; empty if it has had none, or if an interface of that name belongs
        to another port now."""
        if found := self._interface_now(folder, interfaces, number):
            self._interfaces[identity] = found
            return found
        last = self._interfaces.get(identity, "")
        return "" if os.path.exists(f"{self._net}/{last}") else last

    def _interface_now(self, folder: str, interfaces: list[str], number: str) -> str:
        for interface in interfaces:  # `dev_port` counts from 0
            if _text(f"{self._net}/{interface}/dev_port") == str(int(number) - 1):
                return interface
        alone = len(interfaces) == 1 and len(_names(f"{folder}/ports")) == 1
        return interfaces[0] if alone else ""

    def _nodes(self) -> dict[str, tuple[str, ...]]:
        """Character devices by port name; one for a whole device counts for port 1."""
        found: dict[str, tuple[str, ...]] = {}
        for folder in (f"{self._sys}/class/infiniband_verbs", f"{self._sys}/class/infiniband_mad"):
            for node in _names(folder):
                device = _text(f"{folder}/{node}/ibdev")
                if device and not node.startswith("issm"):
                    port = _text(f"{folder}/{node}/port") or "1"
                    name = f"{device}/{port}"
                    found[name] = (*found.get(name, ()), node)
        return found

    # --- both ---------------------------------------------------------------------------------

    def _values(self, names: Sequence[str], folders: list[str]) -> dict[str, int]:
        """The counters of one port, each from the first folder that has it."""
        if _matches(names, self._scope.no_counters):
            return {}
        found = {}
        for counter in self._counters:
            for folder in folders:
                value = self._value(f"{folder}/{counter}")
                if value is not None:
                    found[counter] = value
                    break
        return found

    def _value(self, path: str) -> int | None:
        if path in self.refused:
            return None
        try:
            with open(path, "rb", buffering=0) as file:
                return int(file.read(64))
        except OSError as error:
            if error.errno == errno.EINVAL:
                self.refused.add(path)
            return None
        except ValueError:
            return None  # for instance "N/A (no PMA)"

    def _near(self, device: str) -> tuple[str, ...]:
        return nearest(os.path.realpath(device), self._gpus) if self._gpus else ()


def _link(path: str) -> str:
    """Name of what a link of sysfs leads to; empty if there is no such link."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return ""


def _card(device: str) -> str:
    """Of a PCI device, such as ``0000:3b:00.1``: see :class:`Port`."""
    address, _, _ = _link(device).rpartition(".")
    return address if address.count(":") == 2 else ""


def _instance(folder: str) -> int:
    """Of an RDMA device: see :class:`Port`. Each folder of sysfs gets an inode of its own."""
    try:
        return os.stat(folder).st_ino
    except OSError:
        return 0


def _identity(folder: str, name: str, number: str) -> str:
    """Of port ``number`` of an RDMA device: see :class:`Port`."""
    guid = _text(f"{folder}/node_guid")
    return f"{guid}/{number}" if guid.strip("0:") else name


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""


def _matches(names: Sequence[str], patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _is_virtual_function(device: str) -> bool:
    return os.path.exists(f"{device}/physfn")


def _number(state: str) -> str:
    """``4`` of ``4: ACTIVE``."""
    return state.partition(":")[0]


def _medium(device: str, port: str) -> Medium:
    driver = os.path.basename(os.path.realpath(f"{device}/device/driver"))
    if driver == EFA_DRIVER:
        return Medium.EFA
    return Medium.ROCE if _text(f"{port}/link_layer") == "Ethernet" else Medium.INFINIBAND


def _speed(interface: str) -> float | None:
    """Megabits per second; drivers without one report -1 or an error."""
    try:
        return float(value) if (value := int(_text(f"{interface}/speed"))) > 0 else None
    except ValueError:
        return None


def _ib_rate(text: str) -> float | None:
    """Megabits per second of ``400 Gb/sec (4X NDR)``."""
    number, _, rest = text.partition(" ")
    try:
        return float(number) * 1000 if rest.startswith("Gb/sec") else None
    except ValueError:
        return None


def _default_route(proc: str, net: str) -> set[str]:
    """Interfaces of default routes and their lower devices (members of a bond, a VLAN's device)."""
    waiting = [
        *_default_v4(_text(f"{proc}/net/route")),
        *_default_v6(_text(f"{proc}/net/ipv6_route")),
    ]
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            entries = _names(f"{net}/{name}")
            waiting += [e.removeprefix("lower_") for e in entries if e.startswith("lower_")]
    return found


def _default_v4(text: str) -> Iterator[str]:
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 8 and fields[1] == fields[7] == "00000000":
            yield fields[0]


def _default_v6(text: str) -> Iterator[str]:
    for line in text.splitlines():
        fields = line.split()
        # The kernel lists its own unreachable default on lo.
        if len(fields) >= 10 and fields[0] == "0" * 32 and fields[1] == "00" and fields[9] != "lo":
            yield fields[9]
