"""A job on a modelled device: no access to a tensor of the script is left without an order.

Training runs in a stream other than the default one, as in FSDP2 and in many scripts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import HOT, LONG, PACE, ROOT, Golden, Run, running
from tmd.core.values.model import PlanKind
from tmd.demo.cluster import ready
from tmd.embedded import EmbeddedRedis

SCRIPT = str(ROOT / "tests" / "e2e" / "scripts" / "twin_script.py")


async def test_a_rank_is_drained_live_while_copies_and_checkpoints_are_made(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """The state is copied beside training to a shadow, to another host's memory and to a file."""
    saving = ("--snapshots", "5", "--checkpoints", str(tmp_path / "saved"))
    async with running(
        tmp_path, redis.url, faults=[PACE], arguments=(*LONG, *saving), script=SCRIPT
    ) as run:
        await run.cluster.until(lambda v: ready(v, 3, 1), "all train, the standby waits")
        await run.cluster.drain("h2")
        plan = await run.done("drain")

        assert plan.kind is PlanKind.PLANNED
        await run.ends_like(long_golden)
        in_order(run, workers=4)


@pytest.mark.thorough
@pytest.mark.parametrize("hot", [True, False])
async def test_a_rank_is_lost(
    hot: bool, tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """A hot standby or a copy of the state replaces it; digests are computed beside training."""
    async with running(
        tmp_path,
        redis.url,
        faults=[PACE, "data@0:100=wait", "backward@2:120=kill"],
        arguments=LONG,
        script=SCRIPT,
        more_config=HOT if hot else "[shadow]\nenabled = false\n",
    ) as run:
        if hot:
            await run.shadowed()
        run.let_go("between")
        run.let_go("data")
        await run.done("trainer")

        assert run.fired("backward")
        await run.ends_like(long_golden, lost=1, unwritten=[(2, 120)])
        in_order(run, workers=3)


def in_order(run: Run, workers: int) -> None:
    """No race of any worker, and each has copied and ordered something."""
    seen: dict[str, Any] = {
        each.stem: json.loads(each.read_text()) for each in run.cluster.trace.glob("device-*.json")
    }
    assert len(seen) == workers, f"{[*seen]} have written what they did"
    for name, facts in seen.items():
        assert facts["races"] == [], "\n".join([name, *dict.fromkeys(facts["races"])])
        assert facts["staged"] > 0, name
        assert facts["ordered"] > 0, name
