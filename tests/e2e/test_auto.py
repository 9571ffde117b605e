"""An unchanged script of transformers goes on through a move and a loss with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.frameworks import need
from tests.e2e.harness import ROOT, RUNNER, running
from tmd.embedded import EmbeddedRedis

SCRIPT = str(ROOT / "tests" / "e2e" / "scripts" / "unchanged_script.py")
STEPS = ("--steps", "400")
"""So many that some are left after a drain and a loss."""


def saved(folder: str) -> bytes:
    """The model that a run has saved."""
    return Path(folder, "model.safetensors").read_bytes()


@pytest.mark.thorough
@pytest.mark.usefixtures("compiler")
async def test_an_unchanged_script_is_drained_and_killed(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """Its losses, and the model that it saves."""
    need("transformers")
    (tmp_path / "golden").mkdir()
    straight, disturbed = str(tmp_path / "straight"), str(tmp_path / "disturbed")
    golden = golden_of(
        tmp_path / "golden", (*STEPS, "--out", straight), script=SCRIPT, runner=RUNNER
    )
    async with running(
        tmp_path / "run",
        redis.url,
        arguments=(*STEPS, "--out", disturbed),
        script=SCRIPT,
        runner=RUNNER,
    ) as run:
        assert await run.drain_and_kill() == ([0], [1])
        await run.ends_like(golden, lost=1)
    assert saved(straight) == saved(disturbed)
