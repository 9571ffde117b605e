"""A script with Accelerate goes on through a move and a loss with the same numbers."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.frameworks import contents, need, undisturbed_in
from tests.e2e.harness import CRAWL, ROOT, Golden, running
from tests.marks import thorough
from tmd.core.values.checkpoints import PARTIAL, name_of
from tmd.embedded import EmbeddedRedis

SCRIPT = str(ROOT / "tests" / "e2e" / "scripts" / "accelerate_script.py")
SAVED = (10, 20, 30, 40)
"""Steps whose checkpoints the script writes."""


@pytest.fixture(scope="module")
def accelerate_golden(tmp_path_factory: pytest.TempPathFactory) -> tuple[Golden, Path]:
    """Results of the undisturbed run, and the folder in which it wrote."""
    need("accelerate")
    return undisturbed_in(tmp_path_factory.mktemp("accelerate_golden"), SCRIPT)


def written(folder: Path, scratch: Path) -> dict[str, dict[str, Any]]:
    """What the checkpoints of a run contain."""
    return contents(folder / "checkpoints", scratch / "whole")


def writes(folder: Path) -> Counter[str]:
    """Lines of the script, without the names that workers give to their folders."""
    lines = (folder / "writes").read_text().splitlines()
    return Counter(re.sub(r"\.[0-9a-f]{8}\.new$", ".new", line) for line in lines)


def once_each() -> Counter[str]:
    """Lines of the script if each rank writes its part once, and one worker joins them once."""
    names = [name_of(step) + PARTIAL for step in SAVED]
    parts = [f"{name}/part-{rank}.new" for name in names for rank in range(3)]
    return Counter([*names, *parts])


# In the first epoch of 13 steps 5 and 11 evaluate, and 15 is its end. The second one begins at 16.
@pytest.mark.parametrize(
    ("point", "step"), [("backward", 22), thorough("evaluation", 21), thorough("optimizer", 24)]
)
async def test_a_drain_of_rank_0_and_a_loss_change_no_number(
    point: str,
    step: int,
    tmp_path: Path,
    redis: EmbeddedRedis,
    accelerate_golden: tuple[Golden, Path],
) -> None:
    """Losses, gathered evaluations, weights, lines of a tracker and checkpoints. Each evaluation is
    reported once, and each checkpoint written once. One of both lies between the drain and the
    loss."""
    golden, folder = accelerate_golden
    faults = [CRAWL, "forward@1:18=wait", f"{point}@1:{step}=kill"]
    async with running(
        tmp_path / "run", redis.url, faults=faults, script=SCRIPT, standby=("s1", "s2")
    ) as run:
        await run.drain_rank_0()
        run.let_go("forward")
        await run.done("trainer")

        assert run.fired(point)
        # A rank that dies in the optimizer has voted, and leaves no line.
        await run.ends_like(golden, lost=1, unwritten=[(1, 24)])
        told = (run.cluster.trace / "reports").read_text().splitlines()
        assert [line.split()[0] for line in told] == [str(n) for n in range(1, len(told) + 1)]
        assert len(told) == 6
    lines, expected_lines = ((f / "lines").read_text() for f in (run.cluster.trace, folder))
    assert lines == expected_lines
    # By the worker whose rank 0 was moved away, and nobody else.
    assert len((run.cluster.trace / "finished").read_text().splitlines()) == 1
    saved, expected = written(run.cluster.trace, tmp_path), written(folder, tmp_path)
    assert saved.keys() == {name_of(step) for step in SAVED}
    assert saved == expected
    assert writes(run.cluster.trace) == once_each()


def test_a_job_goes_on_from_a_checkpoint(
    tmp_path: Path, accelerate_golden: tuple[Golden, Path]
) -> None:
    """In the second epoch, with the numbers of the undisturbed run. It reads the data, the schedule
    and the evaluations so far from the checkpoint."""
    golden, folder = accelerate_golden
    begun = name_of(SAVED[1])
    shutil.copytree(folder / "checkpoints" / begun, tmp_path / "trace" / "checkpoints" / begun)
    again = golden_of(tmp_path, script=SCRIPT)

    assert again.weights == golden.weights
    assert min(step for _, step in again.trace.commits) == SAVED[1]
    losses = {key: line["loss"] for key, line in golden.trace.commits.items()}
    assert {k: v["loss"] for k, v in again.trace.commits.items()}.items() <= losses.items()
    saved, expected = written(tmp_path / "trace", tmp_path), written(folder, tmp_path)
    assert saved == {name: expected[name] for name in map(name_of, SAVED[1:])}
