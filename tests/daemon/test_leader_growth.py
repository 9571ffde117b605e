"""What a leader's turn costs as a cluster grows: each host is looked at as often with many jobs as
with few."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
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
from tmd.core.planning.status_reads import AT_ONCE, EVERY_S
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.limits import PlanLimits, ShadowGoals
from tmd.core.values.model import (
    Activity,
    ClusterView,
    Exit,
    HostStatus,
    JobRecord,
    Member,
    Membership,
)
from tmd.core.values.requests import DrainRequest
from tmd.daemon.bus import Topic, Wake
from tmd.daemon.candidate import Candidate, LeaderConfig
from tmd.daemon.deciding import FAILED_S, Decider
from tmd.daemon.leader import AGAIN_S, Leader
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

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Collection[str] | None] = []
        """The hosts that were asked for, by turn."""

    def client(self) -> Any:
        client = super().client()

        async def snapshot(hosts: Collection[str] | None = None) -> ClusterView:
            self.asked.append(hosts)
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


def leading(data: MemoryStore, folder: Path) -> Leader:
    store, health = data.client(), StoreHealth()
    config = LeaderConfig("a", ttl_s=9, renew_s=3, poll_s=1.0, limits=LIMITS)
    candidate = Candidate(store, config, Records(folder), health)
    candidate.lease = Lease(epoch=1, until=float("inf"))
    return Leader(store, config, candidate, [policy() for policy in POLICIES], health)


async def most_reads(folder: Path, jobs: int) -> int:
    """How often a turn that decides nothing reads a host, at most."""
    data = Fixed()
    data.view = view(jobs)
    leader = leading(data, folder)
    reads.clear()
    await leader.turn()
    assert set(reads) == {host.host for host in data.view.hosts}
    return max(reads.values())


@pytest.mark.looptime
async def test_a_turn_looks_at_a_host_as_often_with_many_jobs_as_with_few(tmp_path: Path) -> None:
    assert await most_reads(tmp_path, jobs=24) == await most_reads(tmp_path, jobs=3)


def ended_elsewhere(job: str) -> HostStatus:
    """A host without workers of ``job`` that says how one of them ended."""
    return HostStatus("elsewhere", "i", exits=(Exit("gone", job, -9, at=1.0),))


@pytest.mark.looptime
async def test_a_job_is_not_looked_at_again_before_something_changes_or_a_deadline() -> None:
    decider, name = Decider(LIMITS, ShadowGoals()), "job0"
    before = view(jobs=2)
    silent = structs.replace(before, hosts=before.hosts[1:])
    first = min(limit for limit in structs.astuple(LIMITS) if limit > 0)

    def looks(at: ClusterView) -> bool:
        at.host("")  # builds the index of the view
        reads.clear()
        assert decider.next(at, name, ()) is None
        return bool(reads)

    assert looks(before)
    assert not looks(structs.replace(before, breaker=Breaker(reason="closed")))
    assert looks(structs.replace(before, breaker=Breaker(open=True)))
    assert looks(silent)
    assert not looks(silent)
    assert looks(structs.replace(silent, drains=(DrainRequest("job1-h0", "d"),)))
    assert looks(structs.replace(silent, hosts=(*silent.hosts, ended_elsewhere(name))))
    assert looks(structs.replace(silent, drains=(DrainRequest("job1-h0", "d"),)))
    await asyncio.sleep(first + 0.1)
    assert looks(structs.replace(silent, drains=(DrainRequest("job1-h0", "d"),)))


@pytest.mark.looptime
async def test_a_record_that_somebody_else_writes_does_not_keep_the_leader_from_other_jobs(
    tmp_path: Path,
) -> None:
    """It decides about the others in the same turn, and comes back to this one after a pause."""
    data = Fixed()
    data.view = structs.replace(view(jobs=2), jobs=())  # the records have not been read
    for host in data.view.hosts:
        for worker in host.workers:
            structs.force_setattr(worker, "activity", Activity.STARTING)
    await data.client().put_job(record("h", job="job0", revision=3), expected=0)
    wait = await leading(data, tmp_path).turn()
    stored = {r.job: r.revision for r in (await data.client().jobs()).records}

    assert stored == {"job0": 3, "job1": 1}
    assert wait == AGAIN_S


@pytest.mark.looptime
async def test_a_decision_that_fails_leaves_its_job_alone_for_a_while() -> None:
    """The error does not end the daemon, and the other jobs are decided about."""
    decider, before = Decider(LIMITS, ShadowGoals()), view(jobs=2)
    broken: Any = (None,)  # no verdict: any error in a decision

    assert decider.next(before, "job0", broken) is None
    failed_at = asyncio.get_running_loop().time()
    assert decider.due("job0") == failed_at + FAILED_S
    assert decider.next(before, "job1", ()) is None
    assert decider.due("job1") != failed_at + FAILED_S


@pytest.mark.looptime
async def test_a_decision_that_fails_does_not_say_that_the_job_is_protected() -> None:
    """What was lacking before is still lacking."""
    decider, before = Decider(LIMITS, ShadowGoals()), view(jobs=1)
    before = structs.replace(before, hosts=before.hosts[:RANKS])  # without a standby
    broken: Any = (None,)
    decider.next(before, "job0", ())
    lacking = decider.gap("job0")
    decider.next(before, "job0", broken)

    assert lacking is not None
    assert decider.gap("job0") == lacking


@pytest.mark.looptime
async def test_in_a_large_cluster_a_turn_reads_what_is_due_and_what_has_changed(
    tmp_path: Path,
) -> None:
    """The first one reads all, and so does one after which anything may have changed."""
    data = Fixed()
    data.view = ClusterView(hosts=tuple(HostStatus(f"h{n:05}", "i") for n in range(AT_ONCE + 1000)))
    leader = leading(data, tmp_path)

    await leader.turn()
    leader.hear(Wake(Topic.LEADER))
    await leader.turn()
    await asyncio.sleep(EVERY_S)
    leader.hear(Wake(Topic.HOST, "h01999"))
    await leader.turn()
    leader.hear(Wake(Topic.HOST, "h01998"))
    await leader.turn()
    leader.hear(Wake(Topic.ALL))
    await leader.turn()

    first, request, due, change, any_change = data.asked
    assert first is None
    assert request == set()
    assert due == {"h01999", *(f"h{n:05}" for n in range(AT_ONCE))}
    assert change == {"h01998"}
    assert any_change is None
