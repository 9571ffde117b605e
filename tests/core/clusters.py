"""A job of some ranks ``h0``, ``h1``, ... that are replicas, as the leader sees it."""

from __future__ import annotations

from msgspec import structs

from tests import values
from tmd.core.planning.migration import PlanFacts
from tmd.core.values.model import (
    Activity,
    ClusterView,
    Exit,
    HostStatus,
    MigrationPlan,
    WorkerStatus,
)
from tmd.testing.clients import worker_status

STEP = 7


def status(host: str, activity: Activity, *, size: int, **changes: object) -> WorkerStatus:
    """Of the worker on ``host``; all ranks are replicas unless ``changes`` says something else."""
    plain = worker_status(values.worker(host), activity=activity, world_size=size)
    return structs.replace(plain, **{"address": f"{host}:1", **changes})


class Scene:
    """What each host says of its worker; a test changes it and asks for the facts."""

    def __init__(self, size: int = 3, standbys: int = 0) -> None:
        self.size = size
        self.ranks = tuple(f"h{n}" for n in range(size))
        self.record = values.record(*self.ranks)
        self.silent: set[str] = set()
        """Hosts of which nothing is heard."""
        self.statuses: dict[str, WorkerStatus] = {}
        self.exits: dict[str, Exit] = {}
        for rank, host in enumerate(self.ranks):
            self.says(host, Activity.TRAINING, rank=rank, epoch=1, step=STEP)
        for number in range(standbys):
            self.says(f"s{number}", Activity.STANDBY)

    def says(self, host: str, activity: Activity, **changes: object) -> None:
        self.statuses[host] = status(host, activity, size=self.size, **changes)

    def halts(self, host: str, **changes: object) -> None:
        """Acknowledge the plan of the record."""
        plan = self.plan.id
        fields: dict[str, object] = {"rank": self.ranks.index(host), "epoch": 1, "step": STEP}
        self.says(host, Activity.STUCK, **{**fields, "plan": plan, **changes})

    def exit(self, host: str, code: int | None) -> None:
        """The worker has ended, or (``None``) begins to."""
        self.exits[host] = Exit(values.worker(host), self.record.job, code, 0.0)
        if code is not None:
            self.statuses.pop(host, None)

    def fails(self, *hosts: str) -> MigrationPlan:
        """A failover names the workers of ``hosts``, and is what the record says from now on."""
        plan = structs.replace(
            values.failover(self.record, *map(values.worker, hosts)),
            witnesses=self.record.membership.members,
            new=structs.replace(self.record.membership, epoch=self.record.proposed + 1),
        )
        self.record = structs.replace(self.record, plan=plan)
        for host in hosts:
            self.exit(host, -9)
        return plan

    @property
    def plan(self) -> MigrationPlan:
        assert self.record.plan is not None
        return self.record.plan

    @property
    def view(self) -> ClusterView:
        names = [n for n in {**self.statuses, **self.exits} if n not in self.silent]
        hosts = tuple(
            HostStatus(
                name,
                "i",
                workers=(self.statuses[name],) if name in self.statuses else (),
                exits=(self.exits[name],) if name in self.exits else (),
                standby=name not in self.ranks,
            )
            for name in sorted(names)
        )
        return ClusterView(hosts=hosts, jobs=(self.record,))

    @property
    def facts(self) -> PlanFacts:
        return PlanFacts(self.view, self.record.job)
