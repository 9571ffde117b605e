"""A trainer of torchtitan goes on through moves and losses with the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.frameworks import torchtitan
from tests.e2e.harness import PACE, ROOT, Golden, forked, running
from tests.marks import thorough
from tmd.embedded import EmbeddedRedis

SCRIPT = str(ROOT / "tests" / "e2e" / "scripts" / "torchtitan_script.py")
STEPS = 16
HOSTS = ("h1", "h2")


@pytest.fixture(scope="module", autouse=True)
def titan() -> Iterator[None]:
    """Workers are forks of a process that has imported torchtitan."""
    python = torchtitan()
    with forked(compiler=True, python=python, first="tmd.integrations.torchtitan"):
        yield


def arguments(layout: str) -> tuple[str, ...]:
    return ("--steps", str(STEPS), "--layout", layout)


@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory):
    """By layout: results of the undisturbed run, and the folder in which it wrote."""

    @cache
    def golden(layout: str) -> tuple[Golden, Path]:
        folder = tmp_path_factory.mktemp(f"{layout}_golden")
        return golden_of(folder, arguments(layout), len(HOSTS), SCRIPT), folder / "trace"

    return golden


@pytest.mark.parametrize("layout", ["fsdp", thorough("ddp")])
async def test_a_drain_of_rank_0_and_a_kill(
    layout: str, tmp_path: Path, redis: EmbeddedRedis, goldens
) -> None:
    """In one run, with validations and a checkpoint between them."""
    golden, folder = goldens(layout)
    faults = [PACE, "forward@0:14=wait", "backward@1:14=kill"]
    async with running(
        tmp_path,
        redis.url,
        faults=faults,
        script=SCRIPT,
        arguments=arguments(layout),
        active=HOSTS,
        standby=("s1", "s2"),
    ) as run:
        await run.reached("between")
        await run.cluster.drain("h1", soft=True)
        moved = await run.done("drain")
        run.let_go("between")
        run.let_go("forward")
        lost = await run.done("trainer")

        assert [m.rank for m in moved.moves] == [0]
        assert run.fired("backward")
        assert [m.rank for m in lost.moves] == [1]
        await run.ends_like(golden, lost=1)
        assert (run.cluster.trace / "log").read_text() == (folder / "log").read_text()
        assert checkpoints(run.cluster.trace) == checkpoints(folder)


def checkpoints(folder: Path) -> list[str]:
    """All files of the checkpoints."""
    return sorted(str(f.relative_to(folder)) for f in (folder / "checkpoint").glob("**/*"))
