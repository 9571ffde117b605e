"""A made-up cluster for the page: a job after a drain and a loss, and one without standbys."""

from __future__ import annotations

import math
import random
import time

from msgspec import structs

from tests.values import alert
from tmd.core.values.checkpoints import SavedCheckpoint
from tmd.core.values.model import (
    Activity,
    ClusterView,
    Exit,
    HostStatus,
    JobRecord,
    JobState,
    Mark,
    Member,
    Membership,
    MigrationPlan,
    Move,
    Phase,
    PlanKind,
    Rehearsal,
    Severity,
    ShadowAssignment,
    ShadowStatus,
    WorkerStatus,
)
from tmd.core.values.pace import Pace
from tmd.core.values.requests import DrainRequest
from tmd.core.values.snapshots import Kept
from tmd.daemon.web.page_samples import KEPT, History

JOB, OTHER = "llama-70b", "reward-8b"
RANKS, SPARE, OTHER_RANKS = 32, 6, 4
STEP = 48_210
SLOW_RANK = 21
HOT = {RANKS + 3: 0, RANKS + 4: 8}
"""The rank that each hot standby shadows, by the number of its host."""
DRAINED, LOST = "gpu-006", "gpu-014"
TTL_S = 1e9


def host(number: int) -> str:
    return f"gpu-{number:03}"


def member(name: str, job: str = JOB) -> Member:
    return Member(f"{name}/{job}/0.a", name, f"{name}:1")


def members() -> tuple[Member, ...]:
    """The drained and the lost host have given their rank to a standby."""
    heirs = {DRAINED: host(RANKS + 1), LOST: host(RANKS + 2)}
    names = [host(n) for n in range(1, RANKS + 1)]
    return tuple(member(heirs.get(name, name)) for name in names)


def busy_s(rank: int, noise: random.Random, slow: bool = True) -> float:
    usual = 1.18 + 0.02 * noise.random()
    return usual * (1.45 if slow and rank == SLOW_RANK else 1.0)


def trains(
    rank: int, of: Member, step: int, noise: random.Random, slow: bool = True
) -> WorkerStatus:
    busy = busy_s(rank, noise, slow)
    return WorkerStatus(
        worker=of.worker,
        job=JOB,
        world_size=RANKS,
        address=of.address,
        pid=100 + rank,
        activity=Activity.TRAINING,
        rank=rank,
        epoch=3,
        step=step,
        loss=1.9 + 0.9 * math.exp(-(step - STEP + KEPT) / 150) + 0.03 * noise.random(),
        step_seconds=(1.25 * 1.42 if slow else 1.25) + 0.05 * noise.random(),
        replicas=(rank,),
        kept=(Kept(rank, STEP - 4), Kept((rank + 1) % RANKS, STEP - 4)),
        pace=Pace(step=step, busy_s=busy, ratio=1.0, slow_since=None, lost_s=0.0),
        saved=SavedCheckpoint(step=STEP - 210, at=time.time() - 300, path="/data/checkpoints"),
    )


def waits(name: str, shadows: int | None, rehearsed: bool = True) -> WorkerStatus:
    of = member(name)
    verdicts = (Rehearsal(step=STEP - 900, seconds=4.1, ranks=tuple(range(RANKS))),)
    return WorkerStatus(
        worker=of.worker,
        job=JOB,
        world_size=RANKS,
        address=of.address,
        pid=99,
        activity=Activity.STANDBY if shadows is None else Activity.IN_STEP,
        rehearsed=verdicts if rehearsed else (),
        shadow=None if shadows is None else ShadowStatus(shadows, 1.0, 0.041, STEP - 1),
    )


def plans(now: float) -> tuple[MigrationPlan, ...]:
    """A drain, a failover of a lost worker, and a move that was given up."""
    old = Membership(1, tuple(member(host(n)) for n in range(1, RANKS + 1)))

    def plan(number: int, **changes: object) -> MigrationPlan:
        plain = MigrationPlan(
            f"{JOB}-{number}", PlanKind.PLANNED, Phase.DONE, (), old, old, "drain", ""
        )
        return structs.replace(plain, **changes)

    def marks(ago: float, *phases: tuple[Phase, float]) -> tuple[Mark, ...]:
        at, found = now - ago, []
        for phase, seconds in phases:
            found.append(Mark(phase, at))
            at += seconds
        return tuple(found)

    moved = (Move(5, member(DRAINED), member(host(RANKS + 1)), member(DRAINED)),)
    lost = (Move(13, member(LOST), member(host(RANKS + 2)), member(host(15))),)
    given_up = (Move(21, member(host(22)), member(host(RANKS + 3)), member(host(22))),)
    return (
        plan(
            2,
            moves=moved,
            reason=f"drain of {DRAINED} requested by anna",
            policy="drain_requested",
            how="live shadow",
            choice=(
                f"{host(33)} takes rank 5: it shadows no rank, its host holds none, rehearsed",
            ),
            timings={"transfer": 6.1, "prepare": 0.4},
            timeline=marks(
                430,
                (Phase.PREPARE, 8.2),
                (Phase.READY, 1.4),
                (Phase.SWITCH, 0.21),
                (Phase.RESUME, 0.06),
                (Phase.DONE, 0),
            ),
        ),
        plan(
            3,
            kind=PlanKind.FAILOVER,
            moves=lost,
            cause="trainer.exited",
            reason=f"the worker of rank 13 on {LOST} was killed by signal 9",
            policy="replace_failed",
            dead=(member(LOST).worker,),
            choice=(
                f"{host(34)} takes rank 13: it shadows rank 13, its host holds none, rehearsed",
            ),
            timeline=marks(
                215,
                (Phase.RECOVER, 0.12),
                (Phase.SYNC, 0.34),
                (Phase.RESUME, 0.18),
                (Phase.DONE, 0),
            ),
        ),
        plan(
            4,
            phase=Phase.ABORTED,
            moves=given_up,
            cause="straggler",
            reason="rank 21 has computed 1.45 times as long as its peers",
            policy="rebalance_stragglers",
            outcome=f"given up: {host(35)} did not copy the state in time",
            timeline=marks(80, (Phase.PREPARE, 30.0), (Phase.ABORTED, 0)),
        ),
    )


def alerts(now: float) -> dict[str, list]:
    """By host."""
    job = {"job": JOB, "detector": "trainer"}
    return {
        LOST: [
            alert(
                id="a1",
                host=LOST,
                code="gpu.xid",
                entity="pci:0000:3b:00.0",
                severity=Severity.FATAL,
                message="XID 79: the GPU has fallen off the bus",
                at=now - 217,
            )
        ],
        host(22): [
            alert(
                id="a2",
                host=host(22),
                code="straggler",
                entity="rank 21",
                severity=Severity.DEGRADED,
                message="has computed 1.45 times as long as its peers since step 48104",
                at=now - 120,
                **job,
            )
        ],
        host(9): [
            alert(
                id="a3",
                host=host(9),
                code="nic.crc",
                entity="nic:eth0",
                message="12 frames with a wrong checksum in 60 s",
                count=3,
                at=now - 60,
            )
        ],
    }


def view(now: float, step: int = STEP, slow: bool = True) -> ClusterView:
    """The cluster with the first job at ``step``."""
    noise, found = random.Random(step), alerts(now)
    workers: dict[str, WorkerStatus] = {
        of.host: trains(rank, of, step, noise, slow) for rank, of in enumerate(members())
    }
    for number in range(RANKS + 3, RANKS + SPARE + 1):
        rehearsed = number < RANKS + SPARE
        workers[host(number)] = waits(host(number), HOT.get(number), rehearsed)
    first_other = RANKS + SPARE + 1
    others = tuple(member(host(first_other + n), OTHER) for n in range(OTHER_RANKS))
    for rank, of in enumerate(others):
        workers[of.host] = structs.replace(
            trains(rank, of, 911, noise, False),
            loss=0.4871,
            saved=None,
            job=OTHER,
            worker=of.worker,
            world_size=OTHER_RANKS,
            replicas=tuple(range(OTHER_RANKS)),
            kept=(),
        )
    names = sorted({*workers, DRAINED, LOST})
    lost = {"planned_move": 8.6, "failover": 24.3, "interrupted_step": 19.8, "repeated_steps": 40.2}
    hosts = tuple(
        HostStatus(
            name,
            "i",
            standby=RANKS < int(name[4:]) <= RANKS + SPARE
            and name not in {m.host for m in members()},
            workers=(workers[name],) if name in workers else (),
            exits=(Exit(member(LOST).worker, JOB, -9, now - 215.4),) if name == LOST else (),
            alerts=tuple(found.get(name, ())),
            lost={JOB: lost} if name == host(1) else {},
        )
        for name in names
    )
    jobs = (
        JobRecord(
            job=JOB,
            world_size=RANKS,
            state=JobState.RUNNING,
            membership=Membership(3, members()),
            proposed=4,
            revision=1,
            lease_epoch=1,
            history=plans(now),
            shadows=tuple(
                ShadowAssignment(member(host(number)), rank, stay=True)
                for number, rank in HOT.items()
            ),
        ),
        JobRecord(
            job=OTHER,
            world_size=OTHER_RANKS,
            state=JobState.RUNNING,
            membership=Membership(1, others),
            proposed=1,
            revision=1,
            lease_epoch=1,
        ),
    )
    drains = (DrainRequest(DRAINED, "d1", by="anna", at=now - 432),)
    return ClusterView(hosts=hosts, jobs=jobs, drains=drains)


def history(now: float) -> History:
    """The last ten minutes; one rank becomes slow."""
    found = History()
    for number in range(KEPT):
        at = now - 2 * (KEPT - number)
        found.take(view(now, STEP - KEPT + number, slow=now - at < 130), at)
    return found


async def fill(store, seen: ClusterView) -> None:
    """Store ``seen`` as daemons, the leader and operators would."""
    client = store.client()
    for status in seen.hosts:
        await client.put_host(status, ttl_s=TTL_S, wake=False)
        for raised in status.alerts:
            await client.publish_alert(raised)
    for record in seen.jobs:
        await client.put_job(record, expected=0)
    for request in seen.drains:
        await client.drain(request)
    await client.acquire(f"{host(1)}#1", ttl_s=TTL_S, floor=1)
