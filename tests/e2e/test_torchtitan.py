"""A trainer of torchtitan goes on through moves and losses with the same numbers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from tests.e2e.conftest import golden_of
from tests.e2e.frameworks import contents, torchtitan
from tests.e2e.harness import CRAWL, ROOT, RUNNER, Golden, forked, running
from tests.marks import thorough
from tmd.demo.report import read_trace
from tmd.embedded import EmbeddedRedis

SCRIPT = str(ROOT / "tests" / "e2e" / "scripts" / "torchtitan_script.py")
UNCHANGED = str(ROOT / "tests" / "e2e" / "scripts" / "unchanged_torchtitan.py")
REFUSED = str(ROOT / "tests" / "e2e" / "scripts" / "torchtitan_refused.py")
VENDOR = """
from dataclasses import dataclass
from torchtitan.trainer import Trainer
class VendorTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass
"""
FOREIGN = """
import sys
sys.path.insert(0, sys.path[0] + "/site-packages")
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from vendor import VendorTrainer
VendorTrainer.Config(model_spec=llama3_debugmodel().model_spec).build()
print("trained")
"""
HOSTS = {
    "fsdp": ("h1", "h2"),
    "ddp": ("h1", "h2"),
    "hsdp": ("h1", "h2", "h3", "h4"),
    "tp": ("h1", "h2", "h3", "h4"),
}
"""By layout. Tensor parallel is in pairs, over which FSDP2 divides again."""
TRAINS, VALIDATES = 22, 18
"""Numbers of the session's steps that train and validate, behind its first snapshot."""
KEPT = 2
"""How many checkpoints the script keeps."""

Goldens = Callable[[str], tuple[Golden, Path]]
"""Layout -> results of the undisturbed run, and the folder in which it wrote."""


@pytest.fixture(scope="module", autouse=True)
def titan() -> Iterator[tuple[str, ...]]:
    """Workers are forks of a process that has imported torchtitan."""
    python = torchtitan()
    with forked(compiler=True, python=python, first="tmd.integrations.torchtitan") as prefix:
        yield prefix


def arguments(layout: str) -> tuple[str, ...]:
    return ("--steps", "22", "--layout", layout)


@pytest.fixture(scope="module")
def goldens(titan: object, tmp_path_factory: pytest.TempPathFactory) -> Goldens:
    @cache
    def golden(layout: str) -> tuple[Golden, Path]:
        folder = tmp_path_factory.mktemp(f"{layout}_golden")
        return golden_of(folder, arguments(layout), len(HOSTS[layout]), SCRIPT), folder / "trace"

    return golden


def logged(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


@pytest.mark.parametrize("layout", ["fsdp", thorough("ddp"), thorough("hsdp"), thorough("tp")])
async def test_a_drain_of_rank_0_and_a_kill(
    layout: str, tmp_path: Path, redis: EmbeddedRedis, goldens: Goldens
) -> None:
    """In one run, with validations and checkpoints between them. The drained host stands by."""
    golden, folder = goldens(layout)
    faults = [CRAWL, f"forward@0:{TRAINS}=wait", f"backward@1:{TRAINS}=kill"]
    async with running(
        tmp_path,
        redis.url,
        faults=faults,
        script=SCRIPT,
        arguments=arguments(layout),
        active=HOSTS[layout],
    ) as run:
        assert await run.drain_and_loss() == ([0], [1])
        assert run.fired("backward")
        await run.ends_like(golden, lost=1)
        assert logged(run.cluster.trace) == logged(folder)
    saved, expected = (
        contents(f / "checkpoint", tmp_path / "whole", weights_only=False)
        for f in (run.cluster.trace, folder)
    )
    assert len(expected) == KEPT
    assert saved == expected


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
@pytest.mark.parametrize(
    ("point", "rank", "step"),
    [("evaluation", 1, VALIDATES), ("evaluation", 0, VALIDATES), ("after-vote", 1, TRAINS)],
)
async def test_a_rank_is_lost_in_a_validation_or_after_a_vote(
    point: str,
    rank: int,
    step: int,
    layout: str,
    tmp_path: Path,
    redis: EmbeddedRedis,
    goldens: Goldens,
) -> None:
    """The validation is run again. After a vote torchtitan calls no collective any more."""
    golden, folder = goldens(layout)
    async with running(
        tmp_path,
        redis.url,
        faults=[f"{point}@{rank}:{step}=kill"],
        script=SCRIPT,
        arguments=arguments(layout),
        active=HOSTS[layout],
    ) as run:
        plan = await run.done("trainer")

        assert run.fired(point)
        assert [m.rank for m in plan.moves] == [rank]
        await run.ends_like(golden, lost=1, unwritten=[(1, TRAINS)])
        # A worker that takes rank 0 back to a snapshot does not know what the former one logged.
        again = layout == "fsdp" and rank == 0
        assert sorted(set(logged(run.cluster.trace))) == sorted(logged(folder))
        assert again or len(logged(run.cluster.trace)) == len(logged(folder))


@pytest.mark.thorough
def test_a_job_goes_on_from_a_checkpoint(tmp_path: Path, goldens: Goldens) -> None:
    golden, folder = goldens("fsdp")
    first, _ = sorted((folder / "checkpoint").iterdir())
    names = FileSystemReader(first).read_metadata().state_dict_metadata
    assert "model.layers.0.attention.wo.weight" in names
    shutil.copytree(first, tmp_path / "trace" / "checkpoint" / first.name)
    again = golden_of(tmp_path, arguments("fsdp"), len(HOSTS["fsdp"]), SCRIPT)

    assert again.weights == golden.weights
    lines = logged(tmp_path / "trace")
    assert 0 < len(lines) < len(logged(folder))
    assert lines == logged(folder)[-len(lines) :]
    losses = {key: line["loss"] for key, line in read_trace(tmp_path / "trace").commits.items()}
    assert losses.items() <= {k: v["loss"] for k, v in golden.trace.commits.items()}.items()


def test_what_is_not_supported_is_refused_by_name(titan: tuple[str, ...], tmp_path: Path) -> None:
    command = (*titan, torchtitan(), REFUSED)
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)

    assert done.returncode == 0, done.stderr
    names = [line.partition(": ")[0] for line in done.stdout.splitlines()]
    assert names == [
        "parallelism.pipeline_parallel_degree",
        "parallelism.expert_parallel_degree",
        "CUDA graphs",
        "training.enable_cpu_offload",
        "parallelism.enable_fsdp_symm_mem",
        "compile.enable_async_tensor_parallel",
        "comm.mode='torchcomms'",
        "metrics.save_for_all_ranks",
        "the profiler",
        "checkpoint.initial_load_path",
        "checkpoint.initial_load_in_hf",
        "checkpoint.enable_first_step_checkpoint",
        "checkpoint.load_step",
        "checkpoints in an object store",
        "to go on from checkpoints of torchtitan itself",
        "object, a validator without 'dp_rank'",
        "the trainer of Other.Config",
        "nothing is refused",
    ]


def run_alone(command: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    """An unchanged script as the only worker of a job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
        env={**os.environ, **place, **rendezvous},
    )


def test_an_unchanged_script_gets_the_trainer(titan: tuple[str, ...], tmp_path: Path) -> None:
    """``--auto`` refuses a script that ends without it. CUDA graphs are on by default."""
    script = ("-m", Path(UNCHANGED).stem, "--steps", "2", "--out", str(tmp_path))
    done = run_alone((*titan, torchtitan(), *RUNNER, *script), Path(UNCHANGED).parent)

    assert done.returncode == 0, done.stderr
    assert "runs without CUDA graphs" in done.stdout
    assert (tmp_path / "weights-0").exists()


@pytest.mark.thorough
def test_a_trainer_of_another_package_is_refused(titan: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "vendor.py").write_text(VENDOR)
    (tmp_path / "train.py").write_text(FOREIGN)
    done = run_alone((*titan, torchtitan(), *RUNNER, "train.py"), tmp_path)

    assert done.returncode == 1, done.stderr
    assert "does not know VendorTrainer" in done.stderr
    assert "trained" not in done.stdout


@pytest.mark.thorough
async def test_an_unchanged_script_is_drained_and_killed(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """Its losses, and the weights that it writes. No worker has imported torchtitan before it."""

    def arguments(folder: Path) -> tuple[str, ...]:
        folder.mkdir(parents=True)
        return "--steps", "120", "--out", str(folder)

    def written(folder: Path) -> dict[str, str]:
        return {file.name: file.read_text() for file in folder.glob("weights-*")}

    straight, disturbed, hosts = tmp_path / "straight", tmp_path / "disturbed", HOSTS["fsdp"]
    with forked(compiler=True, python=torchtitan()):
        (tmp_path / "golden").mkdir()
        golden = golden_of(tmp_path / "golden", arguments(straight), len(hosts), UNCHANGED, RUNNER)
        async with running(
            tmp_path / "run",
            redis.url,
            script=UNCHANGED,
            runner=RUNNER,
            arguments=arguments(disturbed),
            active=hosts,
        ) as run:
            assert await run.drain_and_kill() == ([0], [1])
            await run.ends_like(golden, lost=1)
    assert written(straight).keys() == {"weights-0", "weights-1"}
    assert written(straight) == written(disturbed)
