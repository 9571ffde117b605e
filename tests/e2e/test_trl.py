"""A trainer of TRL goes on through moves and losses with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.frameworks import need, undisturbed_in
from tests.e2e.harness import CRAWL, ROOT, running
from tmd.embedded import EmbeddedRedis

SCRIPT = str(ROOT / "tests" / "e2e" / "scripts" / "trl_script.py")
MOVES, DIES = 25, 34
"""Steps of the session. Between two logs both times, so that the metrics of some steps move."""


@pytest.mark.usefixtures("compiler")
async def test_a_drain_of_rank_0_and_a_kill(tmp_path: Path, redis: EmbeddedRedis) -> None:
    """Low-rank adapters of a frozen model, packed text, and the metrics that TRL sums itself."""
    need("trl")
    need("peft")
    golden, straight = undisturbed_in(tmp_path / "golden", SCRIPT)
    faults = [CRAWL, f"forward@0:{MOVES}=wait", f"backward@2:{DIES}=kill"]
    async with running(
        tmp_path / "run", redis.url, faults=faults, script=SCRIPT, standby=("s1", "s2")
    ) as run:
        assert await run.drain_and_loss() == ([0], [2])
        assert run.fired("backward")
        await run.ends_like(golden, lost=1)
    log = (run.cluster.trace / "log").read_text()
    assert log == (straight / "log").read_text()
    assert log.count("num_tokens") > log.count("eval_num_tokens") > 0
