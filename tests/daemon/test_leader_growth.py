"""What a leader's turn costs as a cluster grows: each host is looked at as often with many jobs as
with few."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tmd_policies.drain_degraded import DrainDegraded
from tmd_policies.drain_requested import DrainRequested
from tmd_policies.rebalance_periodic import RebalancePeriodic
from tmd_policies.rebalance_stragglers import RebalanceStragglers
from tmd_policies.replace_failed import ReplaceFailed

from tests.values import record
from tmd.core.planning.election import Lease
from tmd.core.values.limits import PlanLimits
from tmd.core.values.model import Activity, ClusterView, HostStatus, JobRecord, Member, Membership
from tmd.daemon.leader import Candidate, Leader, LeaderConfig
from tmd.daemon.records import Records
from tmd.daemon.store_health import StoreHealth
from tmd.testing import MemoryStore
from tmd.testing.clients import worker_status

POLICIES = (
    DrainDegraded,
    DrainRequested,
    RebalancePeriodic,
    RebalanceStragglers,
    ReplaceFailed,
)
LIMITS = PlanLimits()
RANKS = 3
reads: Counter[str] = Counter()


class Watched(HostStatus, frozen=True):
    """A host that counts how often what it reports is read."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("workers", "exits", "alerts", "reads", "at"):
            reads[super().__getattribute__("host")] += 1
        return super().__getattribute__(name)


class Fixed(MemoryStore):
    """A store whose view is set by the test."""

    view = ClusterView()

    def client(self) -> Any:
        client = super().client()

        async def snapshot() -> ClusterView:
            return self.view

        client.snapshot = snapshot  # type: ignore[method-assign]
        return client


def job(number: int) -> tuple[list[Watched], JobRecord]:
    """One that trains on hosts of its own, with a standby."""
    name = f"job{number}"
    hosts, members = [], []
    for place in range(RANKS + 1):
        host, holds = f"{name}-h{place}", place < RANKS
        status = structs.replace(
            worker_status(f"{host}/{name}/0.a"),
            job=name,
            world_size=RANKS,
            rank=place if holds else None,
            epoch=int(holds),
            activity=Activity.TRAINING if holds else Activity.STANDBY,
        )
        hosts.append(Watched(host, "i", standby=not holds, workers=(status,), at=1000.0))
        if holds:
            members.append(Member(status.worker, host, status.address))
    membership = Membership(epoch=1, members=tuple(members))
    return hosts, record("h", job=name, world_size=RANKS, membership=membership)


def view(jobs: int) -> ClusterView:
    made = [job(number) for number in range(jobs)]
    return ClusterView(
        hosts=tuple(host for hosts, _ in made for host in hosts),
        jobs=tuple(record for _, record in made),
    )


async def most_reads(folder: Path, jobs: int) -> int:
    """How often a turn that decides nothing reads a host, at most."""
    data = Fixed()
    data.view = view(jobs)
    store, health = data.client(), StoreHealth()
    config = LeaderConfig("a", ttl_s=9, renew_s=3, poll_s=1.0, limits=LIMITS)
    candidate = Candidate(store, config, Records(folder), health)
    candidate.lease = Lease(epoch=1, until=float("inf"))
    leader = Leader(store, config, candidate, [policy() for policy in POLICIES], health)
    reads.clear()
    await leader.turn()
    assert set(reads) == {host.host for host in data.view.hosts}
    return max(reads.values())


@pytest.mark.looptime
async def test_a_turn_looks_at_a_host_as_often_with_many_jobs_as_with_few(tmp_path: Path) -> None:
    assert await most_reads(tmp_path, jobs=24) == await most_reads(tmp_path, jobs=3)
