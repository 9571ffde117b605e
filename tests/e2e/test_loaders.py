"""Data augmented in loader processes, whose random numbers follow the rank."""

from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.harness import LONG, PACE, running
from tmd.core.values.model import Phase, PlanKind
from tmd.demo.cluster import host_of
from tmd.embedded import EmbeddedRedis

LOADED = (*LONG, "--loaders", "2")


@pytest.mark.thorough
async def test_loader_processes_draw_the_same_numbers_on_every_host(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """With BatchNorm the digest shows what a standby has loaded. One standby rehearses, shadows and
    takes over in a planned move; the other one takes over after a loss."""
    golden = golden_of(tmp_path, LOADED)
    async with running(
        tmp_path / "run",
        redis.url,
        faults=[PACE],
        standby=("s1", "s2"),
        arguments=LOADED,
        rehearse=True,
    ) as run:
        verdicts = [verdict for _, verdict in await run.rehearsed(2)]
        await run.cluster.drain("h2")
        moved = await run.done("drain")
        await run.kill(0)
        lost = (await run.plans(2))[1]
        held = host_of(await run.cluster.view(), 0)
        await run.ends_like(golden, lost=1)

        assert all(v.has_shown for v in verdicts)
        assert moved.how == "live shadow"
        assert (lost.kind, lost.phase) == (PlanKind.FAILOVER, Phase.DONE)
        assert held is not None
        assert held.host != "h1"
