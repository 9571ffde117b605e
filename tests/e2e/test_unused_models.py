"""A worker takes a rank though it has not used all models that the job has used for long."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.harness import HOT, LONG, PACE, RANKS, Golden, running
from tests.marks import thorough
from tmd.core.values.model import Phase, PlanKind
from tmd.demo.cluster import workers
from tmd.embedded import EmbeddedRedis

SCRIPT = str(Path(__file__).parent / "scripts" / "alternating_script.py")
COLD = "[shadow]\nrehearse = false\n"


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return golden_of(tmp_path_factory.mktemp("alternating"), LONG, len(RANKS), SCRIPT)


@pytest.mark.parametrize(("step", "rank"), [(8, 0), thorough(8, 1), thorough(9, 0), thorough(9, 1)])
async def test_a_model_that_the_standby_has_not_used_sums_the_same_gradients(
    step: int, rank: int, tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """By itself DDP would change the buckets of the model after its first use, on rank 0 for all.
    Messages of different buckets have equal sizes, so that no operation breaks."""
    faults = [f"backward@{rank}:{step}=kill"]
    async with running(
        tmp_path, redis.url, faults=faults, script=SCRIPT, arguments=LONG, more_config=COLD
    ) as run:
        plan = await run.done()

        assert run.fired("backward")
        assert [m.rank for m in plan.moves] == [rank]
        await run.ends_like(golden, lost=1)


@pytest.mark.thorough
async def test_a_standby_that_has_not_used_a_model_is_not_suspected(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """The inputs of its collectives are those of the rank that it follows."""
    async with running(
        tmp_path,
        redis.url,
        faults=[PACE],
        script=SCRIPT,
        arguments=LONG,
        more_config=HOT,
    ) as run:
        view = await run.shadowed()
        refused = [r for w in workers(view) for r in w.rehearsed if r.refusal or r.suspect]
        await run.lose("h2")
        plan = await run.done()
        run.let_go("between")

        assert refused == []
        assert (plan.kind, plan.phase) == (PlanKind.FAILOVER, Phase.DONE)
        await run.ends_like(golden, lost=1)
