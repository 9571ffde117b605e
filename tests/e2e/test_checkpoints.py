"""Checkpoints: those on disk are complete, and a restarted job computes the same numbers."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.e2e import plain_reader
from tests.e2e.conftest import golden_of
from tests.e2e.harness import LONG, PACE, RANKS, Golden, running
from tests.e2e.spread import built, drained, script, spread, undisturbed
from tests.marks import thorough
from tmd import embedded
from tmd.campaign.job import Net
from tmd.core.values.checkpoints import REFUSED, complete, name_of
from tmd.core.values.model import ClusterView, JobState, Severity, State
from tmd.demo.cluster import workers
from tmd.demo.report import read_trace
from tmd.embedded import EmbeddedRedis
from tmd.trainer.state.digests import digest_of

# One at a time: steps of a millisecond do not wait for a disk.
LONE = ("--every", "20")
BEFORE_20 = {(rank, step) for rank in range(len(RANKS)) for step in range(20)}
SHARDED = ("--sharded", "--snapshots", "0")

pytestmark = pytest.mark.usefixtures("compiler")


def writing(folder: Path) -> tuple[str, ...]:
    return ("--checkpoints", str(folder))


def steps_in(folder: Path) -> list[int]:
    return complete(place.name for place in folder.iterdir())


def solo(folder: Path, *arguments: str, ranks: int = 2) -> Golden:
    """Without a daemon, as under torchrun."""
    folder.mkdir()
    return golden_of(folder, arguments, ranks)


def weights(folder: Path, step: int) -> list[Tensor]:
    """The parameters in a checkpoint, read by plain torch."""
    single = folder / f"{step}.pt"
    dcp_to_torch_save(folder / name_of(step), single)
    saved = torch.load(single, weights_only=True)["model"]
    return [saved[name] for name, _ in Net(24).named_parameters()]


async def test_a_job_that_lost_a_state_resumes_from_its_checkpoint(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """It fails and names the step for a resume; restarted it continues with the same numbers."""
    golden = solo(tmp_path / "golden", *SHARDED, ranks=len(RANKS))
    arguments = (*SHARDED, *writing(tmp_path / "c"), *LONE)
    faults = ["forward@1:28=wait", "backward@1:29=kill"]
    async with running(
        tmp_path / "1", redis.url, faults=faults, arguments=arguments, standby=()
    ) as run:
        await run.cluster.until(lambda v: saved(v) == dict.fromkeys(range(3), 20), "saved", 30)
        run.let_go("forward")
        view = await run.cluster.until(
            lambda v: bool(v.jobs) and v.jobs[0].state is JobState.FAILED, "the job has failed"
        )
        detail = view.jobs[0].detail
        assert run.fired("backward")
        assert f"resumes from step 20 ({tmp_path / 'c' / name_of(20)})" in detail
        assert "the state of rank 1 is lost without a replica" in detail
        await run.cluster.finished(60)

    with embedded.redis() as other:
        async with running(tmp_path / "2", other.url, arguments=arguments, standby=()) as run:
            await run.ends_like(golden, unwritten=BEFORE_20)

        assert min(s for _, s in read_trace(run.cluster.trace).commits) == 20


async def test_a_rank_is_lost_while_all_restore_their_checkpoint(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """No rank has begun a step, and the buffers of the rank are in no vote yet."""
    arguments = (*writing(tmp_path / "c"), *LONE)
    async with running(
        tmp_path / "1", redis.url, faults=["forward@1:25=wait"], arguments=arguments, standby=()
    ) as run:
        await run.cluster.until(lambda v: saved(v) == dict.fromkeys(range(3), 20), "saved", 30)

    gates = ["one restoring@1:0=wait", "other restoring@2:0=wait"]
    faults = [*gates, "restoring@0:0=wait", "dies restoring@0:0=kill"]
    with embedded.redis() as other:
        async with running(tmp_path / "2", other.url, faults=faults, arguments=arguments) as run:
            plan = await run.lost_before_a_step("restoring", "one", "other")

            assert run.fired("dies")
            assert plan.resume == 20
            await run.ends_like(golden, lost=1, unwritten=BEFORE_20)


async def test_a_rank_lost_while_writing_leaves_no_partial_checkpoint(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """Only the loss is noticed; a later checkpoint is complete."""
    folder = tmp_path / "c"
    arguments = (*LONG, *writing(folder))
    faults = [PACE, "writing-10@1:*=kill"]
    async with running(tmp_path / "1", redis.url, faults=faults, arguments=arguments) as run:
        await run.done("trainer")
        assert run.fired("writing-10")
        await run.cluster.until(
            lambda v: any(w.saved and w.saved.step > 10 for w in workers(v)), "a later one is whole"
        )
        steps = range(9, len(long_golden.trace.of_rank(1)))
        await run.ends_like(long_golden, lost=1, unwritten={(1, step) for step in steps})

    assert steps_in(folder)
    assert 10 not in steps_in(folder)
    again = solo(tmp_path / "2", *arguments, ranks=len(RANKS))
    assert again.weights == long_golden.weights


@pytest.mark.thorough
async def test_training_survives_a_full_disk(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """It is reported, to operators too, the checkpoint is dropped, and later ones are written. The
    first of them clears the alert."""
    folder = tmp_path / "c"
    faults = [PACE, "writing-10@1:*=full", "joining-20@0:*=full"]
    gates = ["one forward@1:15=wait", "other forward@1:25=wait", "last forward@1:38=wait"]
    async with running(
        tmp_path / "1", redis.url, faults=[*faults, *gates], arguments=writing(folder), standby=()
    ) as run:
        seen = []
        # Rank 0 reports step 10 first: the part of rank 1 did not come in time.
        for gate, expected in (("one", {1: 10}), ("other", {0: 20, 1: 10}), ("last", {})):
            await run.reached(gate)
            view = await run.cluster.until(
                lambda v, expected=expected: tells(missing(v), expected),  # type: ignore[misc]
                f"checkpoints that came to nothing are reported, by rank: {expected}",
            )
            seen.append(missing(view))
            run.let_go(gate)
        await run.ends_like(golden)
        alerts = [a for a in await run.cluster.alerts() if a.code == "trainer.no_checkpoint"]

        assert "checkpoint of step 10: [Errno 28] No space left on device" in seen[0][1]
        assert "checkpoint of step 20: [Errno 28] No space left on device" in seen[1][0]
        assert seen[2] == {}
        assert {a.severity for a in alerts} == {Severity.WARNING}
        about = {a.entity for a in alerts}
        states = [[a.state for a in alerts if a.entity == each] for each in about]
        assert states == [[State.RAISED, State.CLEARED]] * 2
        assert run.fired("writing-10")
        assert run.fired("joining-20")
        assert "No space left" in run.cluster.log("h1") + run.cluster.log("h2")
    assert steps_in(folder) == [30]
    assert {place.name for place in folder.iterdir()} == {name_of(30)}


def saved(view: ClusterView) -> dict[int, int]:
    """By rank: the step of the newest checkpoint."""
    return {w.rank: w.saved.step for w in workers(view) if w.saved and w.rank is not None}


def tells(missing: dict[int, str], expected: dict[int, int]) -> bool:
    """Whether exactly these ranks report, each the missed checkpoint of that step."""
    return missing.keys() == expected.keys() and all(
        f"checkpoint of step {step}: " in missing[rank] for rank, step in expected.items()
    )


def missing(view: ClusterView) -> dict[int, str]:
    """By rank: the alert about a missed checkpoint."""
    members = view.jobs[0].membership if view.jobs else None
    return {
        members.rank_of(alert.entity) if members else -1: alert.message  # type: ignore[misc]
        for host in view.hosts
        for alert in host.alerts
        if alert.code == "trainer.no_checkpoint"
    }


def test_a_damaged_checkpoint_is_refused_and_the_previous_one_used(
    tmp_path: Path, golden: Golden
) -> None:
    """One flipped bit suffices. The following numbers are those of the uninterrupted run."""
    folder = tmp_path / "c"
    solo(tmp_path / "0", "--steps", "21", *writing(folder), *LONE, ranks=len(RANKS))
    whole = solo(tmp_path / "1", *writing(folder), "--every", "30", ranks=len(RANKS))
    damaged = folder / name_of(30) / "part-1" / "__0_0.distcp"
    bits = bytearray(damaged.read_bytes())
    bits[len(bits) // 2] ^= 1
    damaged.write_bytes(bits)

    again = solo(tmp_path / "2", *writing(folder), "--every", "30", ranks=len(RANKS))

    assert whole.weights == again.weights == golden.weights
    assert min(step for _, step in again.trace.commits) == 20
    for place, line in again.trace.commits.items():
        assert line["loss"] == golden.trace.commits[place]["loss"], place
    assert (folder / (name_of(30) + REFUSED)).exists()
    assert steps_in(folder) == [30, 20]
    assert "part-1/__0_0.distcp differs from what was written" in logs(tmp_path / "2")


@pytest.mark.thorough
def test_a_job_resumes_in_the_middle_of_an_epoch(tmp_path: Path, epochs_golden: Golden) -> None:
    """Calls of batches() before the checkpoint end at once."""
    folder, epochs = tmp_path / "c", ("--steps", "10", "--epochs", "4")
    cut = solo(tmp_path / "1", "--steps", "10", "--epochs", "3", *writing(folder), ranks=3)

    again = solo(tmp_path / "2", *epochs, *writing(folder), ranks=3)

    assert cut.weights != epochs_golden.weights == again.weights
    assert len(again.trace.commits) < len(epochs_golden.trace.commits)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 2)])
@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
@pytest.mark.thorough
def test_another_world_size_resumes_with_the_same_weights(
    tmp_path: Path, sharded: bool, before: int, after: int
) -> None:
    """Each rank gets its part of every divided tensor."""
    folder, more = tmp_path / "c", ("--sharded",) if sharded else ()
    solo(tmp_path / "1", "--steps", "21", *more, *writing(folder), *LONE, ranks=before)
    found = weights(folder, 20)

    again = solo(tmp_path / "2", "--steps", "20", *more, *writing(folder), *LONE, ranks=after)

    for rank in range(1, after):
        parts = [p.chunk(after)[rank] if sharded else p for p in found]
        assert again.weights[f"weights-{rank}"] == digest_of(parts)


@pytest.mark.parametrize(
    "layout",
    [
        *map(thorough, ("hybrid", "tensor", "both", "experts", "unlike", "single", "eight")),
        "pipeline",
    ],
)
def test_a_job_of_any_layout_resumes_with_the_same_numbers(tmp_path: Path, layout: str) -> None:
    """Parts of meshes, experts that differ between ranks, weights in bfloat16, and stages of a
    pipeline with replicas and without."""
    written = ("--checkpoints", str(tmp_path / "c"))

    def trained(name: str, *arguments: str) -> Golden:
        (tmp_path / name).mkdir()
        size = 8 if layout == "eight" else 4
        return golden_of(tmp_path / name, (layout, *arguments), size, script(layout))

    whole = trained("whole")
    cut = trained("cut", *written, "--cut", "21")
    again = trained("again", *written)

    assert cut.weights != whole.weights == again.weights
    assert min(step for _, step in again.trace.commits) == 20
    for place, line in again.trace.commits.items():
        assert line["loss"] == whole.trace.commits[place]["loss"], place


@pytest.mark.thorough
async def test_a_rebuilt_standbys_stage_is_in_the_checkpoint(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """Both ranks of a host move, one of them to a standby that was built for another rank; a job
    that resumes from their checkpoint computes the numbers of an uninterrupted job."""
    golden = undisturbed(tmp_path, "pipeline")
    written = ("--checkpoints", str(tmp_path / "c"))
    async with spread(tmp_path, redis, "pipeline", "late between@0:45=wait", more=written) as run:
        moved = await drained(run)
        run.let_go("between")
        await run.reached("late")
        await run.cluster.until(lambda v: saved(v) == dict.fromkeys(range(4), 40), "saved", 30)
        run.let_go("late")
        await run.ends_like(golden)
        others = built(run, "s1")

    (tmp_path / "again").mkdir()
    arguments = ("pipeline", *LONG, *written)
    again = golden_of(tmp_path / "again", arguments, len(golden.weights), script("pipeline"))

    assert [m.rank for m in moved.moves] == [2, 3]
    assert others == [2, 3, 3]
    assert again.weights == golden.weights
    assert min(step for _, step in again.trace.commits) >= 40


def test_plain_torch_reads_a_checkpoint_without_us(tmp_path: Path) -> None:
    """Names are those of state_dict(), for dcp.load and dcp_to_torch_save."""
    solo(tmp_path / "1", "--steps", "21", *writing(tmp_path / "c"), *LONE, ranks=1)
    place = tmp_path / "c" / name_of(20)
    command = (sys.executable, plain_reader.__file__, str(place), str(tmp_path / "single.pt"))

    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    assert done.returncode == 0, done.stderr
    assert float((tmp_path / "single.lr").read_text()) == pytest.approx(1e-2 * 0.7**4)


def logs(folder: Path) -> str:
    return "\n".join(f.read_text() for f in folder.rglob("*") if f.is_file() and "log" in f.name)
