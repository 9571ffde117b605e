"""Turns snapshots of the ports into signals. It does no IO and reads no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase

from msgspec import Struct

from tmd.plugin import Severity, Signal, State

from .counters import CounterHistory, NicFinding
from .links import DOWN, LinkHistory, LinkLimits
from .snapshot import BondedPort, Medium, Port, SeenPort, Snapshot, absent

GONE, NODES = "gone", "devices_missing"
MISSES = 3
"""Consecutive snapshots without a port, or without a device node, before it counts as missing: a
reset takes a moment."""

SETTLED_LOOKS = 12
"""Snapshots after which ports of a bond that still have RDMA devices of their own keep them. A bond
that replaces the devices does so soon after it is made."""


class NicRules(Struct, frozen=True):
    """The operator's settings."""

    expect: tuple[str, ...] = ()
    """Names of ports, or of interfaces of ports, that must exist and be up, from the start."""
    named: tuple[str, ...] = ()
    """Patterns of ports that the operator has named: the job needs them."""
    quiet_s: float = 600.0
    links: LinkLimits = LinkLimits()


class KnownPort(Struct, frozen=True):
    """What the daemon remembers over a restart of a port that has been up."""

    identity: str
    name: str
    medium: Medium
    nodes: tuple[str, ...] = ()
    """Its character devices, when none was missing."""
    card: str = ""


class _Memory:
    """The known state of one port."""

    def __init__(self, port: Port, rules: NicRules, *, was_up: bool = False) -> None:
        self.port = port
        self.link = LinkHistory(rules.links, was_up=was_up)
        self.counters = CounterHistory(rules.quiet_s)
        self.raised: dict[str, Severity] = {}
        self.seen_at: float | None = None
        """When the port was last there, or first missed."""
        self.forgotten = False
        """Whether an operator has declared the host healthy without it: it is not expected after a
        restart."""
        self.misses = 0
        self.node_misses = 0
        self._nodes: dict[str, set[str]] = {}
        """Character devices by kind, as last seen when none of that kind was missing."""
        self._rules = rules

    @property
    def is_expected(self) -> bool:
        """Whether it should be there, and up."""
        return self.link.was_up or any(name in self._rules.expect for name in self.port.names)

    @property
    def known(self) -> KnownPort:
        nodes = sorted(node for kind in self._nodes.values() for node in kind)
        port = self.port
        return KnownPort(port.identity, port.name, port.medium, tuple(nodes), port.card)

    def forget_nodes(self) -> None:
        """Expect only the character devices that are there now."""
        self._nodes = {}

    def update_nodes(self, nodes: Sequence[str]) -> list[str]:
        """Take in that the port has the character devices ``nodes`` now; returns those that it had
        and lacks.

        The kernel may number them anew when the driver resets several ports at once, so a device
        is missing only if there are fewer of its kind than before.
        """
        found: dict[str, set[str]] = {}
        for node in nodes:
            found.setdefault(node.rstrip("0123456789"), set()).add(node)
        missing: list[str] = []
        for kind in self._nodes.keys() | found.keys():
            known, present = self._nodes.get(kind, set()), found.get(kind, set())
            if len(present) < len(known):
                missing += known - present
            else:
                self._nodes[kind] = present
        return sorted(missing)


class NicFindings:
    """Turns snapshots into signals."""

    def __init__(
        self,
        rules: NicRules,
        known: Iterable[KnownPort] = (),
        seen: Mapping[str, SeenPort] | None = None,
        bonded: Mapping[str, BondedPort] | None = None,
    ) -> None:
        """``known``: ports that have been up since the host booted. ``seen``: those with an
        RDMA device, by identity. ``bonded``: those of them in a bond."""
        self._rules = rules
        self.seen = dict(seen or {})
        self.bonded = dict(bonded or {})
        self._ports: dict[str, _Memory] = {}
        """What is remembered of each port, by its identity."""
        for each in known:
            port = Port(
                each.name,
                each.identity,
                each.medium,
                interface=self.seen.get(each.identity, SeenPort()).interface,
                card=each.card,
            )
            self._ports[each.identity] = memory = _Memory(port, rules, was_up=True)
            memory.update_nodes(each.nodes)

    @property
    def known(self) -> tuple[KnownPort, ...]:
        """To be passed to the findings after a restart."""
        ports = [self._ports[identity] for identity in sorted(self._ports)]
        return tuple(p.known for p in ports if p.link.was_up and not p.forgotten)

    def observe(self, snapshot: Snapshot, now: float) -> Iterator[Signal]:
        """Signals for what has changed."""
        present = {port.identity: port for port in snapshot.ports}
        yield from self._drop_out_of_scope(snapshot, present)
        yield from self._drop_placeholders({n for port in snapshot.there for n in port.names})
        present |= self._never_seen(snapshot)
        yield from self._renamed(present)
        for identity, port in present.items():
            memory = self._ports.get(identity)
            if memory is None:
                memory = self._ports[identity] = _Memory(port, self._rules)
            if port.state == GONE:
                yield from self._missing(memory, now)
            else:
                yield from self._present(memory, port, now)
        for identity in self._ports.keys() - present.keys():
            yield from self._missing(self._ports[identity], now)
        self.seen = self._remembered(snapshot)
        self.bonded = self._in_bonds(snapshot)

    def _remembered(self, snapshot: Snapshot) -> dict[str, SeenPort]:
        """``seen`` with ``snapshot``; the oldest entries come first."""
        found = {}
        for port in snapshot.there:
            if port.instance:
                before = self.seen.get(port.identity, SeenPort())
                found[port.identity] = SeenPort(port.interface or before.interface, port.instance)
        missed = {name: port for name, port in self.seen.items() if name in self._ports}
        return {**absent(self.seen, {**missed, **found}), **missed, **found}

    def _in_bonds(self, snapshot: Snapshot) -> dict[str, BondedPort]:
        """``bonded`` after ``snapshot``. A port that is missed stays what it was."""
        found = {name: each for name, each in self.bonded.items() if name in self._ports}
        for port in snapshot.there:
            found.pop(port.identity, None)
            if port.instance and (master := snapshot.masters.get(port.interface)):
                before = self.bonded.get(port.identity, BondedPort("", 0))
                looks = min(before.looks + 1, SETTLED_LOOKS) if before.master == master else 0
                found[port.identity] = BondedPort(master, looks)
        return found

    def _drop_out_of_scope(
        self, snapshot: Snapshot, present: Mapping[str, Port]
    ) -> Iterator[Signal]:
        """Forget the ports that are out of scope now: the default route may have moved to one, or a
        bond has replaced the RDMA devices of both ports of a card by a new one."""
        outside = {port.identity for port in snapshot.outside}
        gone = self._ports.keys() - present.keys()
        for identity in (gone & outside) | self._bonded(snapshot, gone - outside):
            yield from self._update(self._ports.pop(identity), {})

    def _bonded(self, snapshot: Snapshot, gone: Set[str]) -> set[str]:
        """Those of ``gone`` whose RDMA devices a bond has replaced: they joined it recently, and
        another of its ports on the same card has a new device."""

        def bond(port: Port) -> tuple[str, str]:
            return port.card, snapshot.masters.get(port.interface, "")

        def is_new(port: Port) -> bool:
            before = self.seen.get(port.identity)
            return before is not None and before.instance != port.instance

        def is_settled(port: Port) -> bool:
            return self.bonded.get(port.identity) == BondedPort(bond(port)[1], SETTLED_LOOKS)

        bonds = {bond(port) for port in snapshot.there if all(bond(port)) and is_new(port)}
        ports = [self._ports[identity].port for identity in gone]
        return {port.identity for port in ports if bond(port) in bonds and not is_settled(port)}

    def _renamed(self, present: Mapping[str, Port]) -> Iterator[Signal]:
        """End the findings of ports that have another name now; what still holds is raised anew.

        This runs before anything is raised, since two ports may have swapped their names. A missing
        port whose name another port has now is called by its identity from then on.
        """
        taken = {port.name for port in present.values()}
        for identity, memory in list(self._ports.items()):
            port, name = present.get(identity), memory.port.name
            if port is not None and port.name != name:
                yield from self._update(memory, {})
            elif port is None and name in taken:
                yield from self._update(memory, {})
                memory.port = memory.port._replace(name=identity)
                if identity == name:  # it had no GUID, and this is the same port
                    del self._ports[identity]

    def forget(self, code: str) -> None:
        """After a restart, do not expect the ports that are down or missing now. ``code`` limits
        this to one finding; empty means all. An operator has declared the host healthy."""
        for memory in self._ports.values():
            down, gone = memory.misses == 0 and memory.port.up is not True, memory.misses > 0
            if (down and code in ("", f"nic.{DOWN}")) or (gone and code in ("", f"nic.{GONE}")):
                memory.forgotten = True
            if code in ("", f"nic.{NODES}"):
                memory.forget_nodes()

    def _never_seen(self, snapshot: Snapshot) -> dict[str, Port]:
        """Placeholders for expected ports that have been missing since the start."""
        missed = [memory.port for memory in self._ports.values() if memory.port.state != GONE]
        known = {name for port in (*snapshot.there, *missed) for name in port.names}
        return {
            name: Port(name=name, identity=name, medium=Medium.UNKNOWN, state=GONE)
            for name in self._rules.expect
            if name not in known
        }

    def _drop_placeholders(self, names: set[str]) -> Iterator[Signal]:
        """Forget the placeholders of expected ports that are there now."""
        for identity, memory in list(self._ports.items()):
            if memory.port.state == GONE and memory.port.name in names:
                yield from self._update(memory, {})
                del self._ports[identity]

    def _present(self, memory: _Memory, port: Port, now: float) -> Iterator[Signal]:
        memory.port, memory.seen_at, memory.misses = port, now, 0
        if port.up is True:
            memory.forgotten = False
        holds = memory.link.observe(port, now, expected=memory.is_expected)
        holds |= memory.counters.observe(port.counters, now)
        missing = memory.update_nodes(port.nodes)
        memory.node_misses = memory.node_misses + 1 if missing else 0
        if memory.node_misses >= MISSES:
            text = f"device {', '.join(missing)} is gone"
            holds[NODES] = NicFinding(Severity.FATAL, text)
        yield from self._update(memory, holds)

    def _missing(self, memory: _Memory, now: float) -> Iterator[Signal]:
        memory.misses += 1
        memory.seen_at = now if memory.seen_at is None else memory.seen_at
        lasts = now - memory.seen_at
        if not memory.is_expected or GONE in memory.raised:
            return
        if memory.misses >= MISSES and lasts >= self._rules.links.down_hold_s:
            gone = NicFinding(Severity.FATAL, f"missing for {lasts:.0f} s")
            held = {code: NicFinding(severity, "") for code, severity in memory.raised.items()}
            yield from self._update(memory, {**held, GONE: gone})

    def _update(self, memory: _Memory, holds: dict[str, NicFinding]) -> Iterator[Signal]:
        """Signals for findings that are new, worse or over."""
        for code, finding in holds.items():
            severity = self._bounded(memory.port, finding.severity)
            known = memory.raised.get(code)
            if known is None or severity.grade > known.grade:
                memory.raised[code] = severity
                yield _signal(memory.port, code, severity, State.RAISED, finding.message)
        for code in [code for code in memory.raised if code not in holds]:
            severity = memory.raised.pop(code)
            yield _signal(memory.port, code, severity, State.CLEARED, "")

    def _bounded(self, port: Port, severity: Severity) -> Severity:
        """``severity``; at most a warning for an Ethernet port that the configuration does not
        name, since the job might not use it."""
        patterns = (*self._rules.named, *self._rules.expect)
        if port.medium is not Medium.ETHERNET or any(fnmatchcase(port.name, p) for p in patterns):
            return severity
        return min(severity, Severity.WARNING, key=lambda each: each.grade)


def _signal(port: Port, code: str, severity: Severity, state: State, message: str) -> Signal:
    facts = (port.medium.value, port.state, f"identity {port.identity}", *port.near)
    return Signal(
        code=f"nic.{code}",
        entity=f"nic:{port.name}",
        severity=severity,
        state=state,
        message=f"{port.name}: {message}" if message else "",
        evidence=tuple(filter(None, facts)),
    )
