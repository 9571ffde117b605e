"""Turns snapshots of the ports into signals. Pure; times are passed in; each finding once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct

from tmd.plugin import Severity, Signal, State

from .counters import CounterHistory, NicFinding
from .links import LinkHistory, LinkLimits
from .snapshot import Medium, Port, Snapshot

GONE, NODES = "gone", "devices_missing"
MISSES = 3
"""Consecutive snapshots that must lack a port before it is gone: a reset takes a moment."""


class NicRules(Struct, frozen=True):
    """The operator's settings."""

    expect: tuple[str, ...] = ()
    """Names of ports that must exist and be up, from the start."""
    named: tuple[str, ...] = ()
    """Patterns of ports that the operator has named: the job needs them."""
    quiet_s: float = 600.0
    links: LinkLimits = LinkLimits()


class _Memory:
    """The known state of one port."""

    def __init__(self, port: Port, rules: NicRules, *, was_up: bool) -> None:
        self.port = port
        self.link = LinkHistory(rules.links, expected=was_up or port.name in rules.expect)
        self.counters = CounterHistory(rules.quiet_s)
        self.raised: dict[str, Severity] = {}
        self.seen_at = 0.0
        self.misses = 0
        self.node_misses = 0
        self._nodes: dict[str, set[str]] = {}
        """Character devices by kind, as last seen when none of that kind was missing."""

    def missing_nodes(self, nodes: Sequence[str]) -> list[str]:
        """The character devices that the port had and lacks now, where it has only ``nodes``.

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

    def __init__(self, rules: NicRules, were_up: Iterable[str] = ()) -> None:
        """``were_up``: identities of ports that have been up since the host booted."""
        self._rules = rules
        self.were_up = set(were_up)
        self._ports: dict[str, _Memory] = {}
        """What is remembered of each port, by its identity."""

    def observe(self, snapshot: Snapshot, now: float) -> Iterator[Signal]:
        """Signals for what has changed."""
        present = {port.identity: port for port in snapshot.ports}
        yield from self._found_at_last({port.name for port in snapshot.ports})
        present |= self._never_seen(snapshot)
        yield from self._renumbered(present)
        for identity, port in present.items():
            memory = self._ports.get(identity)
            if memory is None:
                memory = self._ports[identity] = _Memory(
                    port, self._rules, was_up=identity in self.were_up
                )
                memory.seen_at = now
            if port.state == GONE:
                yield from self._missing(memory, now)
            else:
                yield from self._present(memory, port, now)
        for identity in self._ports.keys() - present.keys():
            yield from self._missing(self._ports[identity], now)

    def _renumbered(self, present: Mapping[str, Port]) -> Iterator[Signal]:
        """End the findings of ports that have another name now; what still holds is raised anew.

        Before any is raised: two ports may have swapped their names.
        """
        for identity, port in present.items():
            memory = self._ports.get(identity)
            if memory is not None and memory.port.name != port.name:
                yield from self._changes(memory, {})

    def forget_down(self) -> None:
        """Stop expecting the ports that are not up now: after a restart they count as unused."""
        self.were_up &= {i for i, memory in self._ports.items() if memory.port.up is True}

    def _never_seen(self, snapshot: Snapshot) -> dict[str, Port]:
        """Placeholders for expected ports that have been missing since the start."""
        known = {port.name for port in snapshot.ports}
        known |= {memory.port.name for memory in self._ports.values() if memory.port.state != GONE}
        return {
            name: Port(name=name, identity=name, medium=Medium.INFINIBAND, state=GONE)
            for name in self._rules.expect
            if name not in known
        }

    def _found_at_last(self, names: set[str]) -> Iterator[Signal]:
        for identity, memory in list(self._ports.items()):
            if memory.port.state == GONE and memory.port.name in names:
                yield from self._changes(memory, {})
                del self._ports[identity]

    def _present(self, memory: _Memory, port: Port, now: float) -> Iterator[Signal]:
        memory.port, memory.seen_at, memory.misses = port, now, 0
        if port.up is True:
            self.were_up.add(port.identity)
        holds = memory.link.observe(
            port.up, port.counters.get("link_downed"), port.rate_mb, now
        ) | memory.counters.observe(port.counters, now)
        missing = memory.missing_nodes(port.nodes)
        memory.node_misses = memory.node_misses + 1 if missing else 0
        if memory.node_misses >= MISSES:
            text = f"device {', '.join(missing)} is gone"
            holds[NODES] = NicFinding(Severity.FATAL, text)
        yield from self._changes(memory, holds)

    def _missing(self, memory: _Memory, now: float) -> Iterator[Signal]:
        memory.misses += 1
        lasts = now - memory.seen_at
        if not memory.link.expected or GONE in memory.raised:
            return
        if memory.misses >= MISSES and lasts >= self._rules.links.down_hold_s:
            gone = NicFinding(Severity.FATAL, f"missing for {lasts:.0f} s")
            held = {code: NicFinding(severity, "") for code, severity in memory.raised.items()}
            yield from self._changes(memory, {**held, GONE: gone})

    def _changes(self, memory: _Memory, holds: dict[str, NicFinding]) -> Iterator[Signal]:
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
        """``severity``, lowered for an Ethernet port that is not named: the job may not use it."""
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
