"""A state that exists once is lost: all go back to a snapshot and compute the same again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.forking import fork_server
from tests.e2e.harness import LONG, PACE, Golden, running
from tmd.core.model import Kind, Phase
from tmd.embedded import EmbeddedRedis

SHARDED = (*LONG, "--sharded")


@pytest.fixture(scope="module", autouse=True)
def compiler() -> Iterator[None]:
    """FSDP2 needs it."""
    with fork_server(compiler=True):
        yield


@pytest.fixture(scope="module")
def sharded_golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return golden_of(tmp_path_factory.mktemp("sharded_golden"), SHARDED)


async def test_a_lost_shard_is_put_back_from_its_keeper(
    tmp_path: Path, redis: EmbeddedRedis, sharded_golden: Golden
) -> None:
    faults = [PACE, "backward@1:27=kill"]
    async with running(tmp_path, redis.url, faults=faults, arguments=SHARDED) as run:
        plan = await run.done("trainer")
        print(plan)
        assert run.fired("backward")
        assert (plan.kind, plan.phase) == (Kind.FAILOVER, Phase.DONE)
        assert plan.rollback is not None
        await run.ends_like(sharded_golden, lost=1)
