"""A script with every common feature is moved and lost: the numbers do not change."""

from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.harness import LONG, PACE, Golden, running
from tmd.core.values.model import Activity, PlanKind
from tmd.demo.cluster import workers
from tmd.embedded import EmbeddedRedis

RICH = str(Path(__file__).with_name("rich.py"))
NEVER_COPIED = "receiving@*:*=kill"
"""A joiner that receives a state by stop-and-copy dies."""
UNSCALED = (*LONG, "--unscaled")


@pytest.fixture(scope="module")
def rich_golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return golden_of(tmp_path_factory.mktemp("rich_golden"), LONG, script=RICH)


@pytest.fixture(scope="module")
def unscaled_golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return golden_of(tmp_path_factory.mktemp("unscaled_golden"), UNSCALED, script=RICH)


async def test_a_rich_script_is_shadowed(
    tmp_path: Path, redis: EmbeddedRedis, rich_golden: Golden
) -> None:
    """Before, in and after a skipped step, an evaluation and a checkpoint; then the rank that
    writes checkpoints moves, too."""
    async with running(
        tmp_path, redis.url, faults=[PACE, NEVER_COPIED], arguments=LONG, script=RICH
    ) as run:
        await run.reached("between")
        await run.cluster.until(
            lambda v: any(w.activity is Activity.STANDBY for w in workers(v)), "a standby waits"
        )
        await run.cluster.drain("h2", soft=True)
        await run.done("drain")
        await run.cluster.undrain("h2")
        await run.cluster.drain("h1")
        first, second = await run.plans(2)
        run.let_go("between")

        assert [m.rank for m in (*first.moves, *second.moves)] == [1, 0]
        assert (first.how, second.how) == ("live shadow", "live shadow")
        await run.ends_like(rich_golden)


@pytest.mark.thorough
async def test_a_standby_with_a_disabled_scaler_rehearses_and_takes_a_rank(
    tmp_path: Path, redis: EmbeddedRedis, unscaled_golden: Golden
) -> None:
    """nanoGPT's scaler is disabled for every type but float16."""
    async with running(
        tmp_path,
        redis.url,
        faults=["hold between@0:120=wait", "backward@1:125=kill"],
        arguments=UNSCALED,
        script=RICH,
        rehearse=True,
    ) as run:
        ((_, verdict),) = await run.rehearsed(1)
        run.let_go("hold")
        plan = await run.done("trainer")

        assert verdict.has_shown, verdict
        assert run.fired("backward")
        assert plan.kind is PlanKind.FAILOVER
        await run.ends_like(unscaled_golden, lost=1)


@pytest.mark.thorough
async def test_a_rich_script_survives_a_loss(
    tmp_path: Path, redis: EmbeddedRedis, rich_golden: Golden
) -> None:
    """In the step after a skipped one: the scaler's state has moved as well."""
    async with running(
        tmp_path,
        redis.url,
        faults=[PACE, "backward@1:41=kill"],
        arguments=LONG,
        script=RICH,
    ) as run:
        await run.cluster.until(
            lambda v: any(w.activity is Activity.STANDBY for w in workers(v)), "a standby waits"
        )
        run.let_go("between")
        plan = await run.done("trainer")

        assert run.fired("backward")
        assert plan.kind is PlanKind.FAILOVER
        await run.ends_like(rich_golden, lost=1)
