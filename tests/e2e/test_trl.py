"""A trainer of TRL goes on through moves and losses with the same numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.frameworks import after_a_loss, need, undisturbed_in
from tests.e2e.harness import CRAWL, ROOT, running
from tmd.embedded import EmbeddedRedis

SCRIPT = str(ROOT / "tests" / "e2e" / "scripts" / "trl_script.py")
MOVES, DIES = 27, 34
"""Steps of the session. Between two logs both times, so that the metrics of some steps move."""
EVALUATES = 17
"""The step of the session in which it logs, evaluates and saves."""


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


@pytest.mark.thorough
@pytest.mark.usefixtures("compiler")
async def test_a_rank_is_lost_in_an_evaluation_after_a_log(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """The log is made again. By then the evaluation that broke has left the model in another mode,
    by which TRL chooses the metrics."""
    need("trl")
    need("peft")
    golden, straight = undisturbed_in(tmp_path / "golden", SCRIPT)
    fault = f"evaluation@2:{EVALUATES}"
    async with after_a_loss(tmp_path / "run", redis, fault, SCRIPT, ()) as run:
        assert run.fired("evaluation")
        await run.ends_like(golden, lost=1)
    assert (run.cluster.trace / "log").read_text() == (straight / "log").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("setting", ["sync_ref_model", "precompute_ref_log_probs"])
def test_a_reference_model_that_would_not_move_is_refused(setting: str) -> None:
    """It is no part of the state of a rank."""
    need("trl")
    code = (
        "from tmd.integrations.trl import DPOConfig, DPOTrainer\n"
        f"args = DPOConfig('out', use_cpu=True, bf16=False, report_to='none', {setting}=True)\n"
        "from tmd.integrations.transformers.arguments import refuse\n"
        "refuse(args, None)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100
    )

    assert f"does not support {setting}" in ended.stderr
