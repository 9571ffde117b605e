"""The records of a large job through planned moves and failovers, as real decisions make them.

Each host has eight workers. What they report is made up: what they would report once each has
followed its directive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tmd.core.planning.forming import form
from tmd.core.planning.migration import is_live
from tmd.core.planning.planning import steer
from tmd.core.values.limits import PlanLimits
from tmd.core.values.model import (
    READABLE_VERSION,
    Activity,
    ClusterView,
    Exit,
    HostStatus,
    JobRecord,
    Member,
    MigrationPlan,
    Phase,
    Urgency,
    Verdict,
    WorkerStatus,
)
from tmd.core.values.requests import DrainRequest

WORKERS = 8
SPARE = 2
STEP = 7


class LargeJob:
    """``record`` is the newest one; :meth:`move` and :meth:`lose` yield each that they make."""

    def __init__(self, ranks: int, *, spare: int = SPARE, name: str = "large") -> None:
        """``spare``: hosts that hold no rank. Without any, ranks that are lost are adopted."""
        self.ranks, self.name = ranks, name
        self.elastic = None if spare else ""
        self.hosts = [f"host-{number:05}" for number in range(ranks // WORKERS + spare)]
        self.alike = tuple(range(ranks))
        self.exits: dict[str, Exit] = {}
        self.drains: tuple[DrainRequest, ...] = ()
        starting = {
            w: self.status(w, Activity.STARTING) for host in self.hosts for w in self.on(host)
        }
        formed = form(self.view(starting, spare=self.hosts[ranks // WORKERS :]), self.name)
        assert formed is not None
        self.record = formed

    def move(self, host: str) -> Iterator[JobRecord]:
        """The ranks of a drained host move; their joiners take the state over at the switch."""
        self.drains = (DrainRequest(host, f"drain-{host}"),)
        yield from self.steered(self.training(), Urgency.DRAIN, self.on(host))
        joiners = self.joiners()
        prepared = {**self.training(), **self.doing(joiners, Activity.PREPARED)}
        yield from self.steered(prepared)
        left = self.doing([move.leaver for move in self.plan.moves], Activity.LEFT)
        yield from self.steered({**prepared, **left})
        yield from self.steered({**self.training(), **left})
        assert self.plan.phase is Phase.DONE

    def lose(self, host: str) -> Iterator[JobRecord]:
        """All workers of a host are killed, and standbys or survivors take their ranks."""
        self.drains = ()
        lost = [m for m in self.record.membership.members if m.host == host]
        self.exits |= {m.worker: Exit(m.worker, self.name, -9, 0.0) for m in lost}
        yield from self.steered(self.training(), Urgency.FAILED, [m.worker for m in lost])
        survivors = [m for m in self.record.membership.members if m.host != host]
        yield from self.steered({**self.training(), **self.doing(survivors, Activity.STUCK)})
        members = self.plan.new.members
        yield from self.steered({**self.training(), **self.doing(members, Activity.SYNCED)})
        yield from self.steered(self.training())
        assert self.plan.phase is Phase.DONE

    @property
    def plan(self) -> MigrationPlan:
        assert self.record.plan is not None
        return self.record.plan

    def steered(
        self,
        statuses: dict[str, WorkerStatus],
        urgency: Urgency = Urgency.DRAIN,
        workers: Sequence[str] = (),
    ) -> Iterator[JobRecord]:
        """One decision of the leader, which has to change the record."""
        request = self.drains[0].id if self.drains else ""
        verdicts = [
            Verdict(self.name, w, urgency, "cause", "reason", request=request) for w in workers
        ]
        view = self.view(statuses)
        after = steer(self.record, view, verdicts, now=9.5, age=0.0, limits=PlanLimits())
        assert after.revision == self.record.revision + 1
        self.record = after
        yield after

    def training(self) -> dict[str, WorkerStatus]:
        """Members train, and all others stand by."""
        spare = {w: self.status(w, Activity.STANDBY) for host in self.hosts for w in self.on(host)}
        return {**spare, **self.doing(self.record.membership.members, Activity.TRAINING)}

    def doing(self, members: Sequence[Member], activity: Activity) -> dict[str, WorkerStatus]:
        membership = self.record.membership
        ranks = {m.worker: rank for rank, m in enumerate(membership.members)}
        plan = self.record.plan if is_live(self.record.plan) else None
        if plan is not None:
            ranks |= {m.leaver.worker: m.rank for m in plan.moves}
        step = STEP + 2 * membership.epoch
        return {
            m.worker: self.status(
                m.worker,
                activity,
                rank=ranks.get(m.worker),
                epoch=membership.epoch,
                step=step,
                plan="" if plan is None else plan.id,
            )
            for m in members
        }

    def joiners(self) -> list[Member]:
        return [move.joiner for move in self.plan.moves if move.joiner is not None]

    def status(self, worker: str, activity: Activity, **changes: object) -> WorkerStatus:
        host = worker.partition("/")[0]
        return WorkerStatus(
            worker=worker,
            job=self.name,
            world_size=self.ranks,
            address=f"{host}.example:5000",
            pid=1,
            activity=activity,
            replicas=self.alike,
            elastic=self.elastic,
            **changes,  # type: ignore[arg-type]
        )

    def view(self, statuses: dict[str, WorkerStatus], spare: Sequence[str] = ()) -> ClusterView:
        hosts = tuple(
            HostStatus(
                host,
                "i",
                standby=host in spare,
                workers=tuple(statuses[w] for w in self.on(host) if w not in self.exits),
                exits=tuple(self.exits[w] for w in self.on(host) if w in self.exits),
                reads=READABLE_VERSION,
            )
            for host in self.hosts
        )
        return ClusterView(hosts=hosts, drains=self.drains)

    def on(self, host: str) -> list[str]:
        """The workers of a host."""
        return [f"{host}/{self.name}/{place}.a" for place in range(WORKERS)]
