"""Unchanged scripts: moves and losses change no number, and a process joins its job once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.frameworks import need
from tests.e2e.harness import ROOT, RUNNER, running
from tmd.embedded import EmbeddedRedis

TWO_TRAINERS = str(ROOT / "tests" / "e2e" / "scripts" / "two_trainers.py")
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


@pytest.mark.usefixtures("compiler")
async def test_a_second_trainer_of_a_script_uses_the_session_of_the_first(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """A process joins once: the two would take the worker's place from each other for ever."""
    need("lightning")
    async with running(
        tmp_path,
        redis.url,
        active=("h1",),
        standby=(),
        script=TWO_TRAINERS,
        runner=RUNNER,
    ) as run:
        codes = await run.cluster.finished(100)
        tested, fitted, joined = (run.cluster.trace / "lines").read_text().splitlines()

    assert codes == {"h1": 0}
    assert tested == "4 steps, 1 test"
    assert "one Trainer.fit() in a process" in fitted
    assert "was called a second time in this process: use the session" in joined
