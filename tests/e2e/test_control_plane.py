"""Leader, daemons and Redis die while ranks move and while they train."""

import contextlib
from pathlib import Path

import pytest

from tests.e2e.harness import GATE, STOP_AND_COPY, Golden, Run, live_plan, running
from tests.marks import thorough
from tmd import embedded
from tmd.core.values.model import Phase
from tmd.demo.cluster import kill, ready
from tmd.embedded import EmbeddedRedis

HELD = {
    Phase.PREPARE: (GATE, "preparing@*:*=wait"),
    Phase.READY: (GATE,),
    Phase.SWITCH: (GATE, "receiving@*:*=wait"),
    Phase.SYNC: ("backward@1:5=kill", "sending@*:*=wait"),
    Phase.RESUME: ("backward@1:5=kill", "synced@*:*=wait"),
}
"""Faults that keep a plan in a phase until released."""


async def replace_leader(run: Run) -> None:
    """Kill -9 the leading daemon; another one leads, and the dead one restarts as by systemd."""
    leader = await run.cluster.leader()
    host = leader.partition("#")[0]
    await kill(run.cluster.daemons[host])
    await run.cluster.start_daemon(host)
    async for _ in run.cluster.views():
        if await run.cluster.leader() not in ("", leader):
            return


@pytest.mark.parametrize(
    "phase",
    [p if p is Phase.SWITCH else thorough(p) for p in HELD],
)
async def test_the_leader_dies_in(
    phase: Phase, tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """The next leader continues the stored plan from its phase."""
    faults = HELD[phase]
    async with running(tmp_path, redis.url, faults=faults, more_config=STOP_AND_COPY) as run:
        if GATE in faults:
            await run.drain_at_gate()
        else:
            await run.reached("backward")
        if phase is Phase.SWITCH:
            await run.armed()
            run.let_go("forward")
        held = live_plan(await run.in_phase(phase))
        await replace_leader(run)
        if phase is Phase.READY:
            await run.armed()
        for fault in faults:
            run.let_go(fault.partition("@")[0])
        plan = await run.done()

        assert held is not None
        assert plan.id == held.id
        await run.ends_like(golden, lost=0 if GATE in faults else 1)


async def test_training_continues_without_daemons(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """Training is not affected; afterwards all reports are complete again."""
    faults = [GATE, "between@1:20=wait"]
    async with running(tmp_path, redis.url, faults=faults) as run:
        await run.at_gate()
        for daemon in run.cluster.daemons.values():
            await kill(daemon)
        run.let_go("forward")
        await run.reached("between")
        for host in list(run.cluster.daemons):
            await run.cluster.start_daemon(host)
        await run.cluster.until(lambda v: ready(v, 3, 1, step=20), "all agents are back")
        run.let_go("between")

        await run.ends_like(golden)
        assert run.fired("between")


@pytest.mark.usefixtures("redis_binary")
async def test_redis_dies_and_returns_empty(tmp_path: Path, golden: Golden) -> None:
    """Training continues without Redis; the record is restored; then a loss is survived."""
    faults = [GATE, "between@1:20=wait", "backward@2:30=kill"]
    folder = tmp_path / "redis"
    folder.mkdir()
    with contextlib.ExitStack() as first:
        server = first.enter_context(embedded.redis(folder))
        async with running(tmp_path / "run", server.url, faults=faults) as run:
            await run.at_gate()
            first.close()
            run.let_go("forward")
            await run.reached("between")
            with embedded.redis(folder):
                view = await run.cluster.until(
                    lambda v: bool(v.jobs) and ready(v, 3, 1, step=20), "all is known"
                )
                run.let_go("between")
                plan = await run.done("trainer")

                assert view.jobs[0].membership.epoch == 1
                assert run.fired("backward")
                assert plan.moves[0].rank == 2
                await run.ends_like(golden, lost=1)


async def test_a_link_breaks_without_a_dead_worker(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """All are stuck and no worker is named: the same members repeat the step in a new epoch."""
    async with running(tmp_path, redis.url, faults=["backward@1:9=sever"]) as run:
        plan = await run.done("link")

        assert run.fired("backward")
        assert plan.moves == ()
        await run.ends_like(golden)
