"""A script with Accelerate goes on through a move and a loss with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.frameworks import need
from tests.e2e.harness import CRAWL, ROOT, Golden, running
from tests.marks import thorough
from tmd.embedded import EmbeddedRedis

SCRIPT = str(ROOT / "tests" / "e2e" / "scripts" / "accelerate_script.py")


@pytest.fixture(scope="module")
def accelerate_golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    need("accelerate")
    return golden_of(tmp_path_factory.mktemp("accelerate_golden"), script=SCRIPT)


# In the first epoch of 13 steps 5 and 11 evaluate, and 15 is its end. The second one begins at 16.
@pytest.mark.parametrize(
    ("point", "step"), [("backward", 22), thorough("evaluation", 21), thorough("optimizer", 24)]
)
async def test_a_drain_of_rank_0_and_a_loss_change_no_number(
    point: str, step: int, tmp_path: Path, redis: EmbeddedRedis, accelerate_golden: Golden
) -> None:
    """Losses, gathered evaluations and weights; each evaluation is reported once."""
    faults = [CRAWL, "forward@1:18=wait", f"{point}@1:{step}=kill"]
    async with running(
        tmp_path, redis.url, faults=faults, script=SCRIPT, standby=("s1", "s2")
    ) as run:
        await run.drain_rank_0()
        run.let_go("forward")
        await run.done("trainer")

        assert run.fired(point)
        # A rank that dies in the optimizer has voted, and leaves no line.
        await run.ends_like(accelerate_golden, lost=1, unwritten=[(1, 24)])
        told = (run.cluster.trace / "reports").read_text().splitlines()
        assert [line.split()[0] for line in told] == [str(n) for n in range(1, len(told) + 1)]
        assert len(told) == 6
