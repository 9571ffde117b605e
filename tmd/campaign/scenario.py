"""Scenarios as values: faults, with their place, time and duration, and the expected outcome.

A file describes one cluster, one job, and scenarios that happen to them one after the other. This
module does not cause faults; :mod:`tmd.campaign.reading` reads the files.
"""

from __future__ import annotations

import tomllib
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, structs

from tmd.core.values.model import Phase
from tmd.core.values.numbers import Count, NotNegative, Positive
from tmd.core.values.reasons import in_words
from tmd.schema import Invalid, Section

POINTS = (
    *("data", "forward", "backward", "before-vote", "in-vote", "after-vote", "optimizer"),
    *("between", "preparing", "prepared", "copying", "tail", "shadowing", "taking", "arming"),
    *("following", "showing", "mirroring", "sending", "receiving", "synced", "left"),
)
"""Fault points in a training process."""
ALONE = (
    *("joiner", "leaver", "standby", "followed", "leader", "follower"),
    *("all", "half", "somebody"),
)
EACH_POINT = "at each point"
WITH_NAME = ("rank", "host")
UNTIL = ("another leader", "a plan", "done", "silence")


class Network(StrEnum):
    """The connection between workers."""

    SHARED = "shared"  # the loopback
    RELAYED = "relayed"  # a relay for each pair of hosts
    NAMESPACES = "namespaces"  # a network namespace for each host, joined by a bridge


class ProcessKind(StrEnum):
    """Processes of a host, which may be of another release."""

    DAEMONS = "daemons"
    WORKERS = "workers"  # and their launchers


class ServerKind(StrEnum):
    """The kind of Redis server."""

    PRIVATE = "private"
    SENTINEL = "sentinel"  # two servers and a Sentinel


class ClusterPart(Section, frozen=True):
    ranks: Annotated[int, Meta(ge=2, le=8)] = 3
    """Number of hosts with a rank each."""
    standbys: Annotated[int, Meta(ge=0, le=8)] = 2
    hot: Annotated[int, Meta(ge=0, le=8)] = 0
    """Number of standbys that follow a rank each."""
    network: Network = Network.SHARED
    redis: ServerKind = ServerKind.PRIVATE
    clocks: bool = False
    """Whether each daemon has a separate wall clock that can be set."""
    rehearse: bool = False
    """Whether standbys rehearse without a request."""
    silence_s: Positive = 2.0
    """A worker that is silent for this long counts as stalled."""
    hang_s: NotNegative = 0.0
    """A worker that commits nothing for this long without a wait for others hangs; 0 is never."""
    config: str = ""
    """More settings of tmd.toml, for all hosts."""
    other: tuple[ProcessKind, ...] = ()
    """Processes of the other release at the start, on all hosts or those of ``other_hosts``."""
    other_hosts: tuple[str, ...] = ()

    @property
    def needs_other(self) -> bool:
        """Whether another release must be installed."""
        return bool(self.other)

    @property
    def active(self) -> tuple[str, ...]:
        """Hosts with a rank at the start."""
        return tuple(f"h{n}" for n in range(1, self.ranks + 1))

    @property
    def spare(self) -> tuple[str, ...]:
        """Hosts with a standby at the start."""
        return tuple(f"s{n}" for n in range(1, self.standbys + 1))

    def __post_init__(self) -> None:
        try:
            tomllib.loads(self.config)
        except tomllib.TOMLDecodeError as error:
            raise Invalid(f"it is not valid TOML: {in_words(error)}", "config") from None
        known = (*self.active, *self.spare)
        if unknown := [host for host in self.other_hosts if host not in known]:
            message = f"there is no host '{unknown[0]}'; there are {', '.join(known)}"
            raise Invalid(message, "other_hosts")

    def others(self, kind: ProcessKind) -> tuple[str, ...]:
        """Hosts whose processes of that kind are of the other release at the start."""
        if kind not in self.other:
            return ()
        return self.other_hosts or (*self.active, *self.spare)


class JobPart(Section, frozen=True):
    steps: Annotated[int, Meta(ge=50)] = 1500
    pace_s: NotNegative = 0.04
    """Additional duration of each step, until all scenarios have ended."""
    arguments: tuple[str, ...] = ()
    """Arguments of the training script."""


class FaultPart(Section, frozen=True):
    kind: str
    where: str = ""
    """rank N, host NAME, joiner, leaver, standby, followed (the rank that a hot standby follows),
    leader, follower, all, half (of the ranks and one more), somebody (whichever process reaches the
    point first)."""
    when: str = "now"
    """now; 'at POINT' of a training process or 'at each point' of the scenario's, for kinds that
    strike within it; 'phase PHASE' of the live plan, for all others."""
    for_s: NotNegative = 0.0
    """Duration of the fault, which is then mended; not for kinds that strike within a process."""
    until: str = ""
    """Instead of a duration: 'N steps', 'N plans' that have ended since the scenario began,
    'another leader', 'a plan', 'done', 'silence' of a host."""
    amount: float = 0.0
    """Size of the fault, in the unit of the kind; 0 for the kind's default."""

    def __post_init__(self) -> None:
        word, _, name = self.where.partition(" ")
        if self.where and self.where not in ALONE and not (word in WITH_NAME and name):
            raise Invalid(f"write one of {', '.join(ALONE)}, 'rank N', 'host NAME'", "where")
        if word == "rank" and not name.isdecimal():
            raise Invalid("the number of a rank is missing: 'rank 1'", "where")
        word, _, name = self.when.partition(" ")
        if word == "at" and name not in POINTS and self.when != EACH_POINT:
            raise Invalid(f"no such point; there are {', '.join(POINTS)}", "when")
        if word == "phase" and name not in list(Phase):
            raise Invalid(f"no such phase; there are {', '.join(Phase)}", "when")
        if self.when != "now" and word not in ("at", "phase"):
            raise Invalid("write 'now', 'at POINT' or 'phase PHASE'", "when")
        if self.until and self.until not in UNTIL and not (self.steps or self.plans):
            raise Invalid(f"write one of {', '.join(UNTIL)}, 'N steps' or 'N plans'", "until")

    @property
    def point(self) -> str:
        """The point of ``when``, if it is one."""
        return self.when.removeprefix("at ") if self.when.startswith("at ") else ""

    @property
    def phase(self) -> Phase | None:
        """The phase of ``when``, if it is one."""
        word, _, name = self.when.partition(" ")
        return Phase(name) if word == "phase" else None

    @property
    def rank(self) -> int | None:
        """The rank of ``where``, if it is one."""
        word, _, name = self.where.partition(" ")
        return int(name) if word == "rank" else None

    @property
    def host(self) -> str:
        """The host of ``where``, if it is one."""
        word, _, name = self.where.partition(" ")
        return name if word == "host" else ""

    @property
    def steps(self) -> int:
        """The number of steps of ``until``, if it is that."""
        return self._number_of("steps")

    @property
    def plans(self) -> int:
        """The number of plans of ``until``, if it is that."""
        return self._number_of("plans")

    def _number_of(self, what: str) -> int:
        number, _, word = self.until.partition(" ")
        return int(number) if word == what and number.isdecimal() else 0


class Expected(Section, frozen=True):
    plans: tuple[str, ...] = ()
    """Every plan that ends, in order: 'failover done', 'planned aborted'..."""
    may: tuple[str, ...] = ()
    """Further plans that are allowed, any number of times."""
    moved: tuple[int, ...] | None = None
    """Ranks that move in the plans that are done; any, if left out."""
    alerts: tuple[str, ...] = ()
    """Codes of findings that must be raised."""
    may_alert: tuple[str, ...] = ()
    """Codes that are allowed as well; no others."""
    repeated: Annotated[int, Meta(ge=0)] = 1
    """Maximum number of steps that are repeated."""
    outcome: str = ""
    """Words that the outcome of at least one plan must contain."""
    how: str = ""
    """Words that say how the joiners of each planned move that is done got their state."""
    decided_within_leases: NotNegative = 0.0
    """Bound for the repeats' median: from the fault to the stored plan, in lease lifetimes."""

    def __post_init__(self) -> None:
        for key in ("plans", "may"):
            for plan in getattr(self, key):
                if plan not in PLANS:
                    raise Invalid(f"a plan is one of {', '.join(PLANS)}", key)


PLANS = ("failover done", "failover aborted", "planned done", "planned aborted")


class Scenario(Section, frozen=True):
    name: str
    why: str = ""
    """A sentence for people."""
    faults: tuple[FaultPart, ...] = ()
    points: tuple[str, ...] = ()
    """Fault points: the scenario is played once for each, under a name of its own."""
    expect: Expected = Expected()
    voted: Expected | None = None
    """The expectation instead if the vote had switched to a move that is then dropped."""
    mended: str = ""
    """Phase of the live plan in which everything is repaired; by default at the end."""
    standbys: int | None = None
    """Number of standbys that wait before and after; by default those of the cluster."""
    within_s: Positive = 60.0
    """Longest time until the cluster is whole again."""
    repeat: Count = 1
    draw: bool = True
    """Whether it may be drawn for a random campaign."""

    def __post_init__(self) -> None:
        if self.mended and self.mended not in list(Phase):
            raise Invalid(f"no such phase; there are {', '.join(Phase)}", "mended")
        if unknown := [point for point in self.points if point not in POINTS]:
            raise Invalid(f"no such point: {unknown[0]}; there are {', '.join(POINTS)}", "points")

    def at_each_point(self) -> tuple[Scenario, ...]:
        """One scenario for each of :attr:`points`, or this one if it has none."""
        return tuple(self._at(point) for point in self.points) or (self,)

    def _at(self, point: str) -> Scenario:
        faults = tuple(
            structs.replace(fault, when=f"at {point}") if fault.when == EACH_POINT else fault
            for fault in self.faults
        )
        return structs.replace(self, name=f"{self.name}-at-{point}", faults=faults, points=())


class Story(Section, frozen=True):
    """The content of one file."""

    name: str
    cluster: ClusterPart = ClusterPart()
    job: JobPart = JobPart()
    scenarios: tuple[Scenario, ...] = ()
