"""What a joiner must load, or make, before it has the state of its rank."""

from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.harness import STOP_AND_COPY, Golden, running
from tmd.core.values.model import PlanKind
from tmd.embedded import EmbeddedRedis

AVERAGED = str(Path(__file__).with_name("averaged.py"))


@pytest.fixture(scope="module")
def averaged_golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return golden_of(tmp_path_factory.mktemp("averaged_golden"), script=AVERAGED)


async def test_what_hands_out_copies_and_what_is_made_late_survive_a_loss(
    tmp_path: Path, redis: EmbeddedRedis, averaged_golden: Golden
) -> None:
    """The whole state is copied. All ranks end with the same weights and the same average."""
    async with running(
        tmp_path,
        redis.url,
        faults=["backward@1:9=kill"],
        script=AVERAGED,
        more_config=STOP_AND_COPY,
    ) as run:
        plan = await run.done("trainer")

        assert run.fired("backward")
        assert plan.kind is PlanKind.FAILOVER
        await run.ends_like(averaged_golden, lost=1)
