"""Hosts with several ranks: all of them move, or are lost, together."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.harness import LONG, Golden, Run, history, running
from tmd.core.values.model import Activity, Phase, PlanKind
from tmd.demo.cluster import ready, workers
from tmd.embedded import EmbeddedRedis

HOSTS = ("h1", "h2")
PER_HOST = 2
RANKS = len(HOSTS) * PER_HOST
GATE = "data@0:5=wait"
"""Rank 0 waits here, and so do all ranks."""
NEVER_COPIED = "receiving@*:*=kill"
"""A joiner that receives a state by stop-and-copy dies."""


@pytest.fixture(scope="module")
def pairs_golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return golden_of(tmp_path_factory.mktemp("pairs_golden"), LONG, RANKS)


def pairs(folder: Path, redis: EmbeddedRedis, *faults: str) -> AbstractAsyncContextManager[Run]:
    """Two hosts of two ranks, and a host of two standbys."""
    return running(
        folder, redis.url, faults=(GATE, *faults), arguments=LONG, active=HOSTS, per_host=PER_HOST
    )


async def at_gate(run: Run) -> None:
    """Wait until all ranks are at the gate and both standbys wait."""
    await run.reached("data")
    await run.cluster.until(lambda v: ready(v, RANKS, PER_HOST), "all train, two standbys wait")


@pytest.mark.thorough
async def test_all_ranks_of_a_host_move_at_once(
    tmp_path: Path, redis: EmbeddedRedis, pairs_golden: Golden
) -> None:
    """One plan, one switch; each rank has a separate joiner that has shadowed it."""
    async with pairs(tmp_path, redis, NEVER_COPIED) as run:
        await at_gate(run)
        await run.cluster.drain("h2")
        await run.in_phase(Phase.PREPARE)
        run.let_go("data")
        plan = await run.done("drain")

        assert [m.rank for m in plan.moves] == [2, 3]
        assert {m.joiner.host for m in plan.moves if m.joiner} == {"s1"}
        assert len({m.joiner.worker for m in plan.moves if m.joiner}) == PER_HOST
        assert plan.how == "live shadow"
        assert len(history(await run.cluster.view())) == 1
        await run.ends_like(pairs_golden)


@pytest.mark.thorough
async def test_all_ranks_of_a_host_are_lost_at_once(
    tmp_path: Path, redis: EmbeddedRedis, pairs_golden: Golden
) -> None:
    """Daemon, launcher and both workers: no process is left to report it."""
    async with pairs(tmp_path, redis) as run:
        await at_gate(run)
        await run.lose("h2")
        run.let_go("data")
        plan = await run.done()

        assert plan.kind is PlanKind.FAILOVER
        assert [m.rank for m in plan.moves] == [2, 3]
        await run.ends_like(pairs_golden, lost=1)


@pytest.mark.thorough
async def test_a_host_that_loses_one_joiner_of_two_moves_no_rank(
    tmp_path: Path, redis: EmbeddedRedis, pairs_golden: Golden
) -> None:
    """The plan is dropped as a whole; the remaining standby does not suffice, so all ranks stay."""
    async with pairs(tmp_path, redis, "shadowing@*:*=kill") as run:
        await at_gate(run)
        await run.cluster.drain("h2")
        await run.in_phase(Phase.PREPARE)
        run.let_go("data")
        first = (await run.plans(1))[0]
        view = await run.cluster.view()
        left = [w for w in workers(view) if w.activity is Activity.TRAINING]

        assert run.fired("shadowing")
        assert first.phase is Phase.ABORTED
        assert {w.rank for w in left} == set(range(RANKS))
        await run.ends_like(pairs_golden, lost=1)
