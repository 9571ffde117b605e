"""How often components fail, and traces drawn from that."""

from __future__ import annotations

import random
import tomllib
from importlib import resources

import msgspec
from msgspec import Struct

from tmd.core.values.errors import ConfigError
from tmd.simulate.values import HOUR, Fault, FaultScope, Job, Warned

DATA = "failures.toml"
DAY_H = 24.0


class Component(Struct, frozen=True, forbid_unknown_fields=True):
    """A row of a published table."""

    name: str
    count: int
    scope: FaultScope
    planned: bool = False


class Table(Struct, frozen=True, forbid_unknown_fields=True):
    """A published table of faults."""

    source: str
    hosts: int
    days: float
    components: tuple[Component, ...]

    def host_hours(self, component: Component) -> float:
        """Mean time between faults of ``component``, in hours of one host."""
        return self.hosts * self.days * DAY_H / component.count


class FaultAssumptions(Struct, frozen=True):
    """What tables do not say, and an operator knows."""

    repair_h: float = 24.0
    """Mean time until a host is back; exponential."""
    notice_h: float = 1.0
    """Time from a warning (a drain request or a finding) to the loss of the host."""
    announced: float = 0.0
    """Share of the faults of hosts that a detector predicts, while the host still works."""
    mtbf_h: float | None = None
    """Mean time between faults of the whole job, instead of the table's."""


def shipped() -> dict[str, Table]:
    """The tables that come with tmd, by name."""
    text = resources.files("tmd.simulate").joinpath(DATA).read_text()
    return {name: msgspec.convert(rows, Table) for name, rows in tomllib.loads(text).items()}


def table_named(name: str) -> Table:
    """The table of this name.

    Raises:
        ConfigError: there is none.
    """
    known = shipped()
    if name not in known:
        raise ConfigError(f"--failures: there is no table '{name}'; there are {', '.join(known)}")
    return known[name]


def mtbf_h(table: Table, job: Job, assumptions: FaultAssumptions) -> float:
    """Mean time between faults of the whole job, in hours."""
    if assumptions.mtbf_h is not None:
        return assumptions.mtbf_h
    return 1.0 / sum(job.hosts / table.host_hours(c) for c in table.components)


def drawn(
    table: Table, job: Job, standbys: int, assumptions: FaultAssumptions, seed: int
) -> tuple[Fault, ...]:
    """One trace of faults, which all setups with at most ``standbys`` standbys share.

    Each component of each place has its own random stream. Another standby adds a place, and leaves
    all other faults as they are. Times between faults are exponential.
    """
    scale = mtbf_h(table, job, assumptions) / mtbf_h(table, job, FaultAssumptions())
    found: list[Fault] = []
    for component in table.components:
        mean_h = scale * table.host_hours(component)
        if component.scope is FaultScope.JOB:
            # A fault of the whole job is drawn once, at the rate of all its hosts together.
            streams, mean_h = [0], mean_h / job.hosts
        else:
            streams = list(range(job.hosts + standbys))
        for place in streams:
            chance = random.Random(f"{seed}/{component.name}/{place}")
            found += _stream(component, place, mean_h * HOUR, job.whole_s, assumptions, chance)
    return tuple(sorted(found, key=lambda f: (f.at_s, f.place, f.component)))


def _stream(
    component: Component,
    place: int,
    mean_s: float,
    whole_s: float,
    assumptions: FaultAssumptions,
    chance: random.Random,
) -> list[Fault]:
    found = []
    at_s = chance.expovariate(1.0 / mean_s)
    while at_s < whole_s:
        warned = Warned.NOT
        if component.planned:
            warned = Warned.DRAIN
        elif component.scope is FaultScope.HOST and chance.random() < assumptions.announced:
            warned = Warned.FINDING
        found.append(
            Fault(
                at_s=at_s,
                place=place,
                component=component.name,
                scope=component.scope,
                repair_s=chance.expovariate(1.0) * assumptions.repair_h * HOUR,
                warned=warned,
                notice_s=assumptions.notice_h * HOUR,
            )
        )
        at_s += chance.expovariate(1.0 / mean_s)
    return found
