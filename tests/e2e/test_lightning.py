"""A Lightning script goes on through a move and losses with the same numbers and files."""

from __future__ import annotations

import csv
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.e2e.frameworks import after_a_loss, need, undisturbed_in
from tests.e2e.harness import PACE, PACE_OF_2, ROOT, Golden, Run, running
from tmd.core.values.model import ClusterView, PlanKind, WorkerStatus
from tmd.demo.cluster import ready, workers
from tmd.embedded import EmbeddedRedis

SCRIPT = str(ROOT / "tests" / "e2e" / "scripts" / "lightning_script.py")
STANDBYS = ("s1", "s2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, compiler: None) -> tuple[Golden, Path]:
    """The golden run, and its folder of lines and checkpoints."""
    need("lightning")
    return undisturbed_in(tmp_path_factory.mktemp("lightning"), SCRIPT)


async def ends_like(run: Run, undisturbed: tuple[Golden, Path], lost: int) -> None:
    """Losses, weights, logged lines and checkpoints are those of the undisturbed run."""
    golden, folder = undisturbed
    await run.ends_like(golden, lost=lost)
    lines, golden_lines = lines_of(run.cluster.trace), lines_of(folder)
    assert lines == golden_lines, f"{lines - golden_lines} instead of {golden_lines - lines}"
    assert files_of(run.cluster.trace) == files_of(folder)
    checkpoints, golden_checkpoints = checkpoints_of(run.cluster.trace), checkpoints_of(folder)
    assert checkpoints.keys() == golden_checkpoints.keys()
    for name, checkpoint in checkpoints.items():
        expected = golden_checkpoints[name]
        assert checkpoint["loops"] == expected["loops"], name
        assert checkpoint["global_step"] == expected["global_step"], name
        for key, tensor in checkpoint["state_dict"].items():
            assert torch.equal(tensor, expected["state_dict"][key]), f"{name}: {key}"


def on_h1(view: ClusterView) -> WorkerStatus:
    """The worker of the first host."""
    (worker,) = [each for each in workers(view) if each.worker.startswith("h1/")]
    return worker


def lines_of(folder: Path) -> Counter[str]:
    """The logged lines; a line that was logged twice counts as two."""
    return Counter((folder / "lines.json").read_text().splitlines())


def collected(folder: Path) -> Counter[tuple[tuple[str, str], ...]]:
    """The rows that Lightning's logger has written for all workers that have held rank 0."""
    return Counter(
        tuple(sorted((name, value) for name, value in row.items() if value))
        for file in (folder / "csv").glob("*/version_*/metrics.csv")
        for row in csv.DictReader(file.read_text().splitlines())
    )


def files_of(folder: Path) -> list[str]:
    """Each write and each removal of a checkpoint, in order."""
    return (folder / "files.txt").read_text().splitlines()


def checkpoints_of(folder: Path) -> dict[str, dict]:
    """All checkpoints, by path. One that is not complete cannot be read."""
    return {
        str(path.relative_to(folder)): torch.load(path, weights_only=True)
        for path in folder.glob("*/*.ckpt")
    }


async def test_rank_0_moves_and_another_rank_is_killed(
    tmp_path: Path, redis: EmbeddedRedis, undisturbed: tuple[Golden, Path]
) -> None:
    """By live shadow, and then by a failover that repeats the step. The model is validated and
    saved before, between and after them. Each line of a logger that collects lines is written by
    one of the workers that have held rank 0, and each of them has the hyperparameters."""
    faults = [PACE_OF_2]
    async with running(tmp_path, redis.url, faults=faults, standby=STANDBYS, script=SCRIPT) as run:
        moved = await run.drain_rank_0()
        # As when the drained host is switched off: what it has collected is written by now.
        await run.cluster.until(lambda v: on_h1(v).rank is None, "h1 holds no rank")
        os.kill(on_h1(await run.cluster.view()).pid, signal.SIGKILL)
        await run.kill(1)
        lost = await run.done("trainer")

        assert [m.rank for m in moved.moves] == [0]
        assert lost.kind is PlanKind.FAILOVER
        await ends_like(run, undisturbed, lost=2)
    assert validations(run.cluster.trace) == 5
    assert collected(run.cluster.trace) == collected(undisturbed[1])
    versions = sorted((run.cluster.trace / "csv").glob("*/version_*"))
    assert [(v / "hparams.yaml").read_text() for v in versions] == ["width: 24\n"] * 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    "where",
    [
        "validation-1@1",
        "validation-2@0",
        "epoch-end-1@0",
        "epoch-end-4@2",
        "backward@0",
        "broadcast-0@0",
    ],
)
async def test_a_rank_is_lost(
    where: str, tmp_path: Path, redis: EmbeddedRedis, undisturbed: tuple[Golden, Path]
) -> None:
    """In a validation, at the end of an epoch, of the last one, too, and in a step of rank 0:
    in its backward, and when DDP broadcasts buffers, before Lightning's forward."""
    faults = [PACE, f"{where}:{20 if where[0] == 'b' else '+'}=kill"]
    async with running(tmp_path, redis.url, faults=faults, standby=("s1",), script=SCRIPT) as run:
        await run.reached("between")
        await run.cluster.until(lambda v: ready(v, 3, 1), "the standby waits")
        run.let_go("between")
        await run.done("trainer")

        assert run.fired(where.partition("@")[0])
        await ends_like(run, undisturbed, lost=1)


@pytest.mark.thorough
@pytest.mark.timeout(240)  # two jobs, one after the other
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_is_lost_in_the_validation_of_a_job_that_stops_early(
    rank: int, tmp_path: Path, redis: EmbeddedRedis, compiler: None
) -> None:
    """The state that the standby takes says that training ends, in the middle of an epoch."""
    need("lightning")
    stops = ("--stops", "10")
    golden = undisturbed_in(tmp_path / "golden", SCRIPT, *stops)
    async with running(
        tmp_path / "run",
        redis.url,
        faults=[PACE, f"validation-1@{rank}:+=kill"],
        standby=STANDBYS,
        script=SCRIPT,
        arguments=stops,
    ) as run:
        await run.reached("between")
        await run.cluster.until(lambda v: ready(v, 3, 2), "the standbys wait")
        run.let_go("between")
        await run.done("trainer")

        assert run.fired("validation-1")
        await ends_like(run, golden, lost=1)
    assert validations(tmp_path / "golden" / "trace") == 2


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["validation-4@0:+", "validation-4@2:+", "backward@0:20"])
async def test_a_rank_with_a_hot_standby_is_lost(
    where: str, tmp_path: Path, redis: EmbeddedRedis, undisturbed: tuple[Golden, Path]
) -> None:
    """It has run the steps and the validations of its rank until then, and logged and saved
    nothing of it. Rank 0 gets a hot standby after all others."""
    async with running(
        tmp_path,
        redis.url,
        faults=[PACE, f"{where}=kill"],
        standby=("s1", "s2", "s3"),
        more_config="[shadow]\nhot = 3\n",
        script=SCRIPT,
    ) as run:
        await run.cluster.until(
            lambda v: sum(bool(w.shadow and w.shadow.verified) for w in workers(v)) == 3,
            "each rank has a hot standby",
        )
        run.let_go("between")
        plan = await run.done("trainer")

        assert run.fired(where.partition("@")[0])
        assert [m.rank for m in plan.moves] == [int(where.partition("@")[2].partition(":")[0])]
        await ends_like(run, undisturbed, lost=1)


@pytest.mark.parametrize(
    ("saved", "step", "epoch"),
    [((), 20, "0"), (("--within",), 22, "1")],
    ids=["after an epoch", "within an epoch"],
)
@pytest.mark.thorough
async def test_a_rank_goes_to_a_worker_that_has_found_a_later_checkpoint(
    saved: tuple[str, ...],
    step: int,
    epoch: str,
    tmp_path: Path,
    redis: EmbeddedRedis,
    compiler: None,
) -> None:
    """The job began without one. A worker that dies in the second epoch is started again, and loads
    one. It takes its rank back where the others are, in an epoch that keeps its number."""
    need("lightning")
    last = ("--begin", "last", *saved)
    golden = undisturbed_in(tmp_path / "golden", SCRIPT, *last)
    fault, folder = f"backward@1:{step}", tmp_path / "run"
    again = {"standby": (), "max_restarts": 1}
    async with after_a_loss(folder, redis, fault, SCRIPT, last, **again) as run:
        assert run.fired("backward")
        await ends_like(run, golden, lost=0)
    assert (run.cluster.trace / "loaded").read_text() == epoch


@pytest.mark.thorough
@pytest.mark.timeout(240)  # three jobs, one after the other
@pytest.mark.parametrize("where", ["backward@1:0", "before-vote@0:4"])
async def test_a_rank_is_lost_in_the_epoch_in_which_a_resumed_job_began(
    where: str, tmp_path: Path, redis: EmbeddedRedis, compiler: None
) -> None:
    """The third one. The standby learns from the rank where training began."""
    need("lightning")
    _, first = undisturbed_in(tmp_path / "first", SCRIPT, "--begin", "last", "--steps", "16")
    begins = ("--begin", str(first / "newest" / "last.ckpt"))
    golden = undisturbed_in(tmp_path / "golden", SCRIPT, *begins)
    async with after_a_loss(tmp_path / "run", redis, where, SCRIPT, begins) as run:
        assert run.fired(where.partition("@")[0])
        await ends_like(run, golden, lost=1)


def validations(folder: Path) -> int:
    return sum("val_loss" in line for line in lines_of(folder))
