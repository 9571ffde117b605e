"""A ``Trainer`` of transformers goes on through moves and losses with the same numbers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.e2e.frameworks import after_a_loss, need, undisturbed_in
from tests.e2e.harness import CRAWL, ROOT, Golden, Run, running
from tests.marks import thorough
from tmd.core.values.model import ClusterView
from tmd.demo.cluster import workers
from tmd.embedded import EmbeddedRedis
from tmd.trainer.state.digests import digest_of

SCRIPT = str(ROOT / "tests" / "e2e" / "scripts" / "transformers_script.py")
TRAINS, EVALUATES, STOPS, STREAMED = 41, 42, 17, 11
"""Numbers of the session's steps in which the script makes its step 25, evaluates after it, and
evaluates after its step 10, the second time, and in which streamed data have ended."""
SAVES, QUIET = 33, 39
"""The same, in which it makes its step 20, after which it saves, and its step 24, in which it logs
nothing."""
TIMES = ("_runtime", "_per_second")
"""Ends of the names of what an evaluation logs of its speed."""


@pytest.fixture(scope="module")
def trainer_golden(compiler: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Golden, Path]:
    """Results of the undisturbed run, and the folder in which it wrote."""
    need("transformers")
    return undisturbed_in(tmp_path_factory.mktemp("transformers_golden"), SCRIPT)


async def ends_like(
    run: Run,
    golden: tuple[Golden, Path],
    *,
    lost: int,
    unwritten: Collection[tuple[int, int]] = (),
    cut: int = 0,
) -> None:
    """The same losses, evaluations, weights and checkpoints; each line is logged once, each
    checkpoint saved once, and written once. ``cut``: how many writes a kill has cut off."""
    await run.ends_like(golden[0], lost=lost, unwritten=unwritten)
    folder = run.cluster.trace
    for name in ("log", "saves"):
        assert (folder / name).read_text() == (golden[1] / name).read_text(), name
    written, expected = writes(folder), writes(golden[1])
    assert set(expected.values()) == {1}
    assert not expected - written
    assert sum((written - expected).values()) == cut
    assert all(line.endswith(" begun") for line in written - expected)
    assert contents(folder) == contents(golden[1])


def writes(folder: Path) -> Counter[str]:
    """The begin and the end of each write of a checkpoint."""
    return Counter((folder / "writes").read_text().splitlines())


def contents(folder: Path) -> dict[str, Any]:
    """By path: what each file of the checkpoints has, and what else is in the trainer's folder."""
    out = folder / "out"
    found = [*out.glob("*"), *out.glob("checkpoint-*/*")]
    return {str(path.relative_to(out)): content(path) for path in found}


def content(path: Path) -> Any:
    """What a file has that is equal in each run, loaded; the bits of tensors as their digest."""
    if path.name == "trainer_state.json":
        return trainer_state(json.loads(path.read_text()))
    match path.suffix:
        case ".json":
            return json.loads(path.read_text())
        case ".safetensors":
            from safetensors.torch import load_file  # only where transformers is

            loaded: Any = load_file(path)
        case ".pt" | ".pth":
            loaded = torch.load(path, weights_only=False)
        case _:
            return None  # a folder, or the arguments of the trainer, which name its folder
    loaded = tree_map_only(Tensor, lambda t: (t.dtype, t.shape, digest_of([t])), loaded)
    return tree_map_only(np.ndarray, np.ndarray.tolist, loaded)


def trainer_state(state: dict[str, Any]) -> dict[str, Any]:
    """Without times, which are never equal, without the folder of the run, and without what each
    rank logs of its own loss: a rank that takes over a history takes those values, too."""
    best = state["best_model_checkpoint"]
    history = [
        {k: v if k != "batch" else None for k, v in each.items() if not k.endswith(TIMES)}
        for each in state["log_history"]
    ]
    return {**state, "best_model_checkpoint": best and Path(best).name, "log_history": history}


async def test_a_drain_of_rank_0_and_a_kill(
    tmp_path: Path, redis: EmbeddedRedis, trainer_golden: tuple[Golden, Path]
) -> None:
    """In one run, with evaluations and a checkpoint between them."""
    faults = [CRAWL, f"forward@0:{TRAINS}=wait", f"backward@2:{TRAINS}=kill"]
    async with running(
        tmp_path, redis.url, faults=faults, script=SCRIPT, standby=("s1", "s2")
    ) as run:
        assert await run.drain_and_loss() == ([0], [2])
        assert run.fired("backward")
        await ends_like(run, trainer_golden, lost=1)


def found(folder: Path) -> list[str]:
    """The checkpoints that workers have found when they began."""
    return sorted(each.read_text() for each in folder.glob("found-*"))


@pytest.mark.thorough
async def test_a_rank_goes_to_a_worker_that_has_found_a_later_checkpoint(
    tmp_path: Path, redis: EmbeddedRedis, compiler: None
) -> None:
    """The script resumes from the newest one, as those of transformers do. The job began without
    one. A worker that is started again finds one, and takes its rank back."""
    need("transformers")
    last = ("--resume", "last")
    golden = undisturbed_in(tmp_path / "golden", SCRIPT, *last)
    fault, folder = f"backward@1:{TRAINS}", tmp_path / "run"
    again = {"standby": (), "max_restarts": 1}
    async with after_a_loss(folder, redis, fault, SCRIPT, last, **again) as run:
        assert run.fired("backward")
        await ends_like(run, golden, lost=0)
    assert found(run.cluster.trace) == ["checkpoint-20"]


@pytest.mark.thorough
@pytest.mark.timeout(240)  # three jobs, one after the other
@pytest.mark.parametrize(
    "where",
    ["before-vote@1:0", "backward@1:1", "backward@0:4"],
    ids=["on the way to it", "the first step", "a later step"],
)
async def test_a_rank_is_lost_in_the_epoch_in_which_a_resumed_job_began(
    where: str, tmp_path: Path, redis: EmbeddedRedis, compiler: None
) -> None:
    """The standby has read no checkpoint. Which batches of that epoch are left out, the steps over
    which the loss is a mean, and the patience of callbacks it learns from the rank."""
    need("transformers")
    _, first = undisturbed_in(tmp_path / "first", SCRIPT, "--steps", "10")
    resumes = ("--resume", str(first / "out" / "checkpoint-10"), "--patience", "1")
    golden = undisturbed_in(tmp_path / "golden", SCRIPT, *resumes)
    async with after_a_loss(tmp_path / "run", redis, where, SCRIPT, resumes) as run:
        assert run.fired(where.partition("@")[0])
        await ends_like(run, golden, lost=1)


@pytest.mark.parametrize(
    ("point", "rank", "step"),
    [
        thorough("evaluation", 1, EVALUATES),
        thorough("evaluation", 0, EVALUATES),
        thorough("saving", 0, "*"),
        thorough("after-vote", 1, TRAINS),
        thorough("after-vote", 1, EVALUATES),
    ],
    ids=["rank 1 evaluates", "rank 0 evaluates", "rank 0 saves", "optimizer", "after evaluating"],
)
async def test_a_rank_is_lost_in_or_after_a_step(
    point: str,
    rank: int,
    step: object,
    tmp_path: Path,
    redis: EmbeddedRedis,
    trainer_golden: tuple[Golden, Path],
) -> None:
    """The evaluation is run again, and the checkpoint written again by the next rank 0. After a
    vote nothing is run again."""
    faults = [f"{point}@{rank}:{step}=kill"]
    async with running(tmp_path, redis.url, faults=faults, script=SCRIPT) as run:
        plan = await run.done("trainer")

        assert run.fired(point)
        assert [m.rank for m in plan.moves] == [rank]
        # A rank that dies after its vote leaves no line in the trace.
        cut = int(point == "saving")
        await ends_like(run, trainer_golden, lost=1, unwritten=[(1, TRAINS)], cut=cut)


@pytest.mark.thorough
async def test_a_rank_is_lost_where_another_one_has_a_hot_standby(
    tmp_path: Path, redis: EmbeddedRedis, trainer_golden: tuple[Golden, Path]
) -> None:
    """The standby has logged, evaluated and counted along with its rank, and written nothing."""
    faults = [CRAWL, f"forward@0:{TRAINS}=wait", f"evaluation@0:{EVALUATES}=kill"]
    hot = "[shadow]\nhot = 1\n"
    async with running(tmp_path, redis.url, faults=faults, script=SCRIPT, more_config=hot) as run:
        await run.shadowed()
        run.let_go("between")
        run.let_go("forward")
        await run.done("trainer")

        assert run.fired("evaluation")
        await ends_like(run, trainer_golden, lost=1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "fault",
    [
        f"backward@0:{QUIET}=kill",
        f"backward@0:{QUIET + 2}=kill",
        f"evaluation@0:{EVALUATES}=kill",
        f"saving@0:{SAVES + 1}=wait",
    ],
    ids=["a step", "a step that logs", "an evaluation", "a checkpoint"],
)
async def test_rank_0_is_lost_and_has_a_hot_standby(
    fault: str, tmp_path: Path, redis: EmbeddedRedis, trainer_golden: tuple[Golden, Path]
) -> None:
    """The standby has saved and logged nothing while it followed rank 0, and does both once it
    holds the rank: also what is due in the step in which it takes it. Rank 0 gets a hot standby
    after all others."""
    faults = [CRAWL, f"forward@0:{SAVES}=wait", fault]
    point, waits = fault.partition("@")[0], fault.endswith("wait")
    async with running(
        tmp_path,
        redis.url,
        faults=faults,
        script=SCRIPT,
        standby=("s1", "s2", "s3"),
        more_config="[shadow]\nhot = 3\n",
    ) as run:
        await run.cluster.until(shadows_rank_0, "a hot standby of rank 0")
        run.let_go("between")
        run.let_go("forward")
        if waits:  # rank 0 has written a part, and its standby waits for it to come to the end
            await run.reached(point)
            await run.cluster.until(
                lambda v: all(w.step == SAVES + 1 for w in workers(v)), "the standbys save, too"
            )
            await run.kill(0)
        await run.done("trainer")

        assert run.fired(point)
        await ends_like(run, trainer_golden, lost=1, cut=int(waits))
    shadowed = run.cluster.trace / "shadowed"
    passed_by = shadowed.read_text().splitlines() if shadowed.exists() else []
    assert waits or "rank 0 checkpoint-20" in passed_by


def shadows_rank_0(view: ClusterView) -> bool:
    """Whether a standby shadows rank 0 with equal digests."""
    shadows = [worker.shadow for worker in workers(view) if worker.shadow]
    return any(shadow.rank == 0 and shadow.verified for shadow in shadows)


@pytest.mark.thorough
@pytest.mark.parametrize("point", ["evaluation", "saving"])
async def test_a_rank_is_lost_while_training_ends_early(
    point: str, tmp_path: Path, redis: EmbeddedRedis, compiler: None
) -> None:
    """A joiner learns from the state that it takes over that its epoch is the last one."""
    need("transformers")
    stops = ("--patience", "1")
    golden = undisturbed_in(tmp_path / "golden", SCRIPT, *stops)
    faults = [f"{point}@0:{STOPS}=kill"]
    async with running(
        tmp_path / "run", redis.url, faults=faults, script=SCRIPT, arguments=stops
    ) as run:
        plan = await run.done("trainer")

        assert run.fired(point)
        assert [m.rank for m in plan.moves] == [0]
        await ends_like(run, golden, lost=1, cut=int(point == "saving"))
        assert (golden[1] / "saves").read_text() == "10\n"


@pytest.mark.thorough
async def test_rank_0_is_lost_before_it_names_the_last_checkpoint(
    tmp_path: Path, redis: EmbeddedRedis, compiler: None
) -> None:
    """After the vote: the other ranks name it and load it. Only what rank 0 would have logged is
    missing."""
    need("transformers")
    stops = ("--patience", "1")
    golden, folder = undisturbed_in(tmp_path / "golden", SCRIPT, *stops)
    faults = [f"after-vote@0:{STOPS}=kill"]
    async with running(
        tmp_path / "run", redis.url, faults=faults, script=SCRIPT, arguments=stops
    ) as run:
        await run.done("trainer")

        assert run.fired("after-vote")
        await run.ends_like(golden, lost=1)
        assert contents(run.cluster.trace) == contents(folder)
        lines = (run.cluster.trace / "log").read_text().splitlines()
        whole = (folder / "log").read_text().splitlines()
        assert set(lines) < set(whole)
        assert len(set(lines)) == len(lines)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("point", "rank", "step"),
    [("epoch-end", 1, "+"), ("evaluation", 0, STREAMED), ("after-vote", 1, STREAMED)],
    ids=["rank 1 ends the epoch", "rank 0 evaluates after it", "after the vote on it"],
)
async def test_a_rank_is_lost_at_the_end_of_streamed_data(
    point: str, rank: int, step: object, tmp_path: Path, redis: EmbeddedRedis, compiler: None
) -> None:
    """The length of the data is unknown, so the end of the epoch is found after the loop. A joiner
    runs it there, like the other ranks."""
    need("transformers")
    streams = ("--stream",)
    golden = undisturbed_in(tmp_path / "golden", SCRIPT, *streams)
    faults = [f"{point}@{rank}:{step}=kill"]
    async with running(
        tmp_path / "run", redis.url, faults=faults, script=SCRIPT, arguments=streams
    ) as run:
        plan = await run.done("trainer")

        assert run.fired(point)
        assert [m.rank for m in plan.moves] == [rank]
        await ends_like(run, golden, lost=1)
