"""A host is drained by stop-and-copy; joiner and leaver die at every phase."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.harness import GATE, STOP_AND_COPY, Golden, history, live_plan, running
from tmd.core.values.model import Activity, Phase, PlanKind
from tmd.demo.cluster import workers
from tmd.embedded import EmbeddedRedis


async def test_drain_hands_over_and_the_leaver_stands_by(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """No step is repeated; the drained worker becomes a standby."""
    async with running(
        tmp_path, redis.url, faults=[GATE, "between@1:20=wait"], more_config=STOP_AND_COPY
    ) as run:
        await run.drain_at_gate()
        await run.armed()
        run.let_go("forward")
        plan = await run.done("drain")
        view = await run.cluster.until(
            lambda v: any(
                w.worker == plan.moves[0].leaver.worker and w.activity is Activity.STANDBY
                for w in workers(v)
            ),
            "the leaver stands by",
        )
        run.let_go("between")

        assert plan.kind is PlanKind.PLANNED
        assert [p.kind for p in history(view)] == [PlanKind.PLANNED]
        await run.ends_like(golden)


async def test_a_host_drained_for_good_ends_its_worker(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """`tmd drain --leave`: the launcher there ends with success while training goes on."""
    async with running(
        tmp_path, redis.url, faults=[GATE, "between@1:20=wait"], more_config=STOP_AND_COPY
    ) as run:
        await run.drain_at_gate(leave=True)
        await run.armed()
        run.let_go("forward")
        code = await run.cluster.launchers["h2"].wait()
        run.let_go("between")

        assert code == 0
        await run.ends_like(golden)


async def test_a_joiner_that_dies_before_the_switch_is_replaced_by_the_next(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """READY: the plan is dropped, training is not affected, the next standby is tried."""
    faults = [GATE, "prepared@*:*=kill"]
    async with running(
        tmp_path, redis.url, faults=faults, standby=("s1", "s2"), more_config=STOP_AND_COPY
    ) as run:
        await run.drain_at_gate(standbys=2)
        await run.reached("prepared")
        await run.plans(1)
        await run.armed()
        run.let_go("forward")
        plan = await run.done("drain")
        first = history(await run.cluster.view())[0]

        assert first.phase is Phase.ABORTED
        assert first.moves[0].joiner != plan.moves[0].joiner
        await run.ends_like(golden, lost=1)


@pytest.mark.thorough
async def test_a_joiner_that_dies_after_the_switch_gives_the_rank_back(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """SWITCH: the leaver still holds its state and takes back its rank."""
    async with running(
        tmp_path, redis.url, faults=[GATE, "receiving@*:*=kill"], more_config=STOP_AND_COPY
    ) as run:
        await run.drain_at_gate()
        await run.armed()
        run.let_go("forward")
        plan = await run.done("trainer")

        assert run.fired("receiving")
        assert plan.kind is PlanKind.FAILOVER
        assert plan.moves[0].joiner is not None
        assert plan.moves[0].joiner.host == "h2"
        await run.ends_like(golden, lost=1)


@pytest.mark.thorough
async def test_a_leaver_that_dies_in_prepare_is_a_failover(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """The planned move is dropped and the rank copied from a replica."""
    faults = [GATE, "preparing@*:*=wait"]
    async with running(tmp_path, redis.url, faults=faults, more_config=STOP_AND_COPY) as run:
        await run.drain_at_gate()
        await run.reached("preparing")
        view = await run.in_phase(Phase.PREPARE)
        leaver = next(w for w in workers(view) if w.rank == 1)
        kill(leaver.pid)
        await run.cluster.until(
            lambda v: (p := live_plan(v)) is not None and p.kind is PlanKind.FAILOVER, "a failover"
        )
        run.let_go("preparing")
        plan = await run.done("trainer")

        assert [m.rank for m in plan.moves] == [1]
        assert history(await run.cluster.view())[0].phase is Phase.ABORTED
        await run.ends_like(golden, lost=1)


@pytest.mark.thorough
async def test_a_leaver_that_dies_while_it_hands_over(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """The vote switched, the state is lost with the leaver: the joiner copies a replica."""
    async with running(
        tmp_path, redis.url, faults=[GATE, "sending@1:*=kill"], more_config=STOP_AND_COPY
    ) as run:
        await run.drain_at_gate()
        await run.armed()
        run.let_go("forward")
        plan = await run.done("leaver")

        assert run.fired("sending")
        assert plan.kind is PlanKind.FAILOVER
        await run.ends_like(golden, lost=1, unwritten=[(1, 5)])


async def test_a_joiner_with_another_model_is_refused(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """It is refused with names and shapes while it prepares; the job is not affected."""
    arguments = ["--odd-host", "s1"]
    async with running(
        tmp_path, redis.url, faults=[GATE], arguments=arguments, more_config=STOP_AND_COPY
    ) as run:
        await run.drain_at_gate()
        plan = (await run.plans(1))[0]
        run.let_go("forward")

        assert plan.phase is Phase.ABORTED
        assert "model.body.0.weight: [32, 16] float32 here, [24, 16] float32" in plan.outcome
        await run.ends_like(golden)


def kill(pid: int) -> None:
    """Kill -9."""
    os.kill(pid, signal.SIGKILL)
