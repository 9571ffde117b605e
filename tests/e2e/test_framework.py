"""A loop that a framework owns goes on through a move and a loss with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import framework
from tests.e2e.conftest import golden_of
from tests.e2e.harness import PACE, Golden, running
from tmd.core.values.model import PlanKind
from tmd.embedded import EmbeddedRedis

SCRIPT = framework.__file__


@pytest.fixture(scope="module")
def framework_golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return golden_of(tmp_path_factory.mktemp("framework_golden"), script=SCRIPT)


@pytest.mark.parametrize("point", ["forward", "backward"])
async def test_a_rank_is_lost_inside_a_closure(
    point: str, tmp_path: Path, redis: EmbeddedRedis, framework_golden: Golden
) -> None:
    """Nothing that the spoilt step raises reaches the loop, and survivors end the step as spoilt.

    The last step, of one batch, is among those that are compared.
    """
    async with running(tmp_path, redis.url, faults=[f"{point}@1:9=kill"], script=SCRIPT) as run:
        plan = await run.done("trainer")

        assert run.fired(point)
        assert plan.kind is PlanKind.FAILOVER
        await run.ends_like(framework_golden, lost=1)
        spoilt = [f.read_text() for f in run.cluster.trace.glob("spoilt-*")]
        assert spoilt.count("1") == 2, spoilt


async def test_a_rank_moves_with_its_part_of_the_data(
    tmp_path: Path, redis: EmbeddedRedis, framework_golden: Golden
) -> None:
    """By live shadow. The loader is built for the rank that the joiner takes, and the counter moves
    with it."""
    async with running(tmp_path, redis.url, faults=[PACE], script=SCRIPT) as run:
        await run.reached("between")
        await run.cluster.drain("h2", soft=True)
        plan = await run.done("drain")

        assert [m.rank for m in plan.moves] == [1]
        assert plan.how == "live shadow"
        await run.ends_like(framework_golden)
