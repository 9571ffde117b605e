"""A loop that a framework owns goes on through a move and a loss with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import framework
from tests.e2e.conftest import golden_of
from tests.e2e.harness import HOT, PACE, Golden, running
from tests.marks import thorough
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


def reports(folder: Path) -> list[str]:
    """What was reported of the evaluations."""
    return (folder / "reports").read_text().splitlines()


# Steps 0 to 4 train, 5 evaluates. 46 is the last that trains, 47 the end of the loop.
@pytest.mark.parametrize(
    ("rank", "step"),
    [(1, 11), (0, 48), thorough(0, 11), thorough(1, 48), thorough(1, 5)],
    ids=["in the loop", "after it", "rank 0 in the loop", "rank 1 after it", "the first one"],
)
async def test_a_rank_is_lost_inside_an_evaluation(
    rank: int, step: int, tmp_path: Path, redis: EmbeddedRedis, framework_golden: Golden
) -> None:
    """It is run again with the joiner, in the loop and after it, and reported once. Its results are
    part of the state that is compared."""
    faults = [f"evaluation@{rank}:{step}=kill"]
    async with running(tmp_path, redis.url, faults=faults, script=SCRIPT) as run:
        plan = await run.done("trainer")

        assert run.fired("evaluation")
        assert [m.rank for m in plan.moves] == [rank]
        await run.ends_like(framework_golden, lost=1)
        told = reports(run.cluster.trace)
        assert [line.split()[0] for line in told] == [str(n) for n in range(1, 9)]


@pytest.mark.thorough
async def test_a_rank_with_a_hot_standby_is_lost_inside_an_evaluation(
    tmp_path: Path, redis: EmbeddedRedis, framework_golden: Golden
) -> None:
    """The standby has evaluated along with its rank, and goes on from the state that it has."""
    faults = [PACE, "forward@0:30=wait", "evaluation@1:35=kill", "sending@*:*=kill"]
    async with running(tmp_path, redis.url, faults=faults, script=SCRIPT, more_config=HOT) as run:
        await run.shadowed()
        run.let_go("between")
        run.let_go("forward")
        await run.done("trainer")

        assert run.fired("evaluation")
        await run.ends_like(framework_golden, lost=1)
        assert len(reports(run.cluster.trace)) == 8


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
