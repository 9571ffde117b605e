"""A script adds a parameter group between two loops; then its ranks move and are lost."""

from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.harness import LONG, STOP_AND_COPY, Golden, running
from tmd.embedded import EmbeddedRedis

TUNED = str(Path(__file__).with_name("tuned.py"))


@pytest.fixture(scope="module")
def tuned_golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return golden_of(tmp_path_factory.mktemp("tuned_golden"), LONG, script=TUNED)


@pytest.mark.parametrize(
    ("config", "how"),
    [
        pytest.param("", "live shadow", id="shadow"),
        pytest.param(STOP_AND_COPY, "stop-and-copy", id="copy", marks=pytest.mark.thorough),
    ],
)
async def test_a_rank_moves_after_a_parameter_group_was_added(
    tmp_path: Path, redis: EmbeddedRedis, tuned_golden: Golden, config: str, how: str
) -> None:
    """The standby comes through the same code on its way, and takes over the new moments, too."""
    async with running(
        tmp_path,
        redis.url,
        faults=["between@0:40=pace", "forward@1:130=wait"],
        standby=("s1", "s2"),
        arguments=LONG,
        script=TUNED,
        more_config=config,
    ) as run:
        await run.reached("between")
        await run.cluster.drain("h1", soft=True)
        plan = await run.done("drain")
        await run.reached("forward")
        await run.kill(1)
        lost = await run.done("trainer")

        assert plan.how.startswith(how)
        assert ([m.rank for m in plan.moves], [m.rank for m in lost.moves]) == ([0], [1])
        await run.ends_like(tuned_golden, lost=1)
