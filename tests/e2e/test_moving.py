"""Scripts whose weights change in a step before the optimizer: a momentum encoder, and SAM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.harness import LONG, PACE, RANKS, STOP_AND_COPY, running
from tests.marks import thorough
from tmd.embedded import EmbeddedRedis

SCRIPT = str(Path(__file__).parent / "scripts" / "moving_script.py")


@pytest.mark.parametrize("options", [(), thorough(("--sam",))], ids=["momentum", "sam"])
async def test_a_rank_moves_and_another_is_lost(
    options: tuple[str, ...], tmp_path: Path, redis: EmbeddedRedis
) -> None:
    arguments = (*LONG, *options)
    (tmp_path / "golden").mkdir()
    golden = golden_of(tmp_path / "golden", arguments, len(RANKS), SCRIPT)
    async with running(
        tmp_path,
        redis.url,
        faults=[PACE],
        script=SCRIPT,
        arguments=arguments,
        more_config=STOP_AND_COPY,
    ) as run:
        assert await run.drain_and_kill() == ([0], [1])
        drained, _ = await run.plans(2)
        assert drained.how.startswith("stop-and-copy")
        run.let_go("between")
        await run.ends_like(golden, lost=1)
