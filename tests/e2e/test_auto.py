"""An unchanged script of transformers goes on through a move and a loss with the same numbers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.frameworks import need
from tests.e2e.harness import ROOT, running
from tmd.core.values.model import Activity, ClusterView
from tmd.demo.cluster import host_of, workers
from tmd.embedded import EmbeddedRedis

SCRIPT = str(ROOT / "tests" / "e2e" / "scripts" / "unchanged_script.py")
RUNNER = ("-m", "tmd.integrations.auto")
"""What ``tmd launch --auto`` makes of its command: :func:`tmd.command.attached`."""


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
    golden = golden_of(tmp_path / "golden", ("--out", straight), script=SCRIPT, runner=RUNNER)
    async with running(
        tmp_path / "run", redis.url, arguments=("--out", disturbed), script=SCRIPT, runner=RUNNER
    ) as run:

        def trained(view: ClusterView) -> bool:
            return any(w.step >= 2 for w in workers(view) if w.activity is Activity.TRAINING)

        await run.cluster.until(trained, "the job trains")
        await run.cluster.drain("h1", soft=True)
        plan = await run.done("drain")
        assert [m.rank for m in plan.moves] == [0]
        await run.cluster.undrain("h1")
        view = await run.cluster.view()
        victim = host_of(view, 1)
        assert victim is not None
        os.kill(victim.workers[-1].pid, signal.SIGKILL)
        plan = await run.done("trainer")
        assert [m.rank for m in plan.moves] == [1]
        await run.ends_like(golden, lost=1)
    assert saved(straight) == saved(disturbed)
