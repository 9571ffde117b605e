"""Ranks of groups that do not span the world: a standby becomes any of them."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.harness import LONG, PACE, Golden, Run, running
from tmd.core.model import Kind, MigrationPlan, Phase
from tmd.demo.cluster import ready
from tmd.embedded import EmbeddedRedis

SCRIPT = str(Path(__file__).with_name("layouts.py"))
HOSTS = ("h1", "h2")
PER_HOST = 2
RANKS = len(HOSTS) * PER_HOST

pytestmark = pytest.mark.usefixtures("compiler")


def undisturbed(folder: Path, layout: str) -> Golden:
    (folder / "golden").mkdir()
    return golden_of(folder / "golden", (layout, *LONG), RANKS, SCRIPT)


def spread(folder: Path, redis: EmbeddedRedis, layout: str) -> AbstractAsyncContextManager[Run]:
    """Two hosts of two ranks, and a host of two standbys."""
    return running(
        folder / "run",
        redis.url,
        faults=[PACE],
        arguments=(layout, *LONG),
        active=HOSTS,
        per_host=PER_HOST,
        script=SCRIPT,
    )


async def drained(run: Run) -> MigrationPlan:
    """Both ranks of a host have moved, and it stands by."""
    await run.reached("between")
    await run.cluster.until(lambda v: ready(v, RANKS, PER_HOST), "all train, two stand by")
    await run.cluster.drain("h2")
    moved = await run.done("drain")
    await run.cluster.until(lambda v: ready(v, RANKS, PER_HOST), "the drained host stands by")
    return moved


@pytest.mark.parametrize(
    "layout", ["hybrid", "tensor", pytest.param("experts", marks=pytest.mark.thorough)]
)
async def test_a_host_moves_and_then_another_is_lost(
    layout: str, tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """Both ranks of a host each time, whose groups are others than those a standby builds."""
    golden = undisturbed(tmp_path, layout)
    async with spread(tmp_path, redis, layout) as run:
        moved = await drained(run)
        for process in (run.cluster.daemons["h1"], run.cluster.launchers["h1"]):
            process.kill()
            await process.wait()
        lost = (await run.plans(2))[1]

        assert [m.rank for m in moved.moves] == [2, 3]
        assert moved.how == "live shadow"
        assert (lost.kind, lost.phase) == (Kind.FAILOVER, Phase.DONE)
        assert [m.rank for m in lost.moves] == [0, 1]
        # A rank may die between its commit and writing it down.
        late = [] if lost.resume is None else [(m.rank, lost.resume - 1) for m in lost.moves]
        await run.ends_like(golden, lost=1, unwritten=late)


@pytest.mark.thorough
async def test_a_host_moves_where_each_state_exists_once(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """Tensor parallel and sharded: there is no replica to learn from."""
    golden = undisturbed(tmp_path, "both")
    async with spread(tmp_path, redis, "both") as run:
        moved = await drained(run)
        run.let_go("between")

        assert [m.rank for m in moved.moves] == [2, 3]
        assert moved.how == "live shadow"
        await run.ends_like(golden)
