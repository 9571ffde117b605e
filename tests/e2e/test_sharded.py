"""FSDP2: every state is unique. It moves with its rank, and never comes from another one."""

from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.harness import HOT, LONG, NEVER_SENT, PACE, Golden, Run, running
from tmd.core.values.model import Activity, JobState, MigrationPlan, Phase, PlanKind
from tmd.demo.cluster import workers
from tmd.embedded import EmbeddedRedis

SHARDED = (*LONG, "--sharded")

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture(scope="module")
def sharded_golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return golden_of(tmp_path_factory.mktemp("sharded_golden"), SHARDED)


async def paced(run: Run) -> None:
    """Wait until the job trains and a standby waits; the job continues slowly."""
    await run.reached("between")
    await run.cluster.until(
        lambda v: any(w.activity is Activity.STANDBY for w in workers(v)), "a standby waits"
    )


@pytest.mark.thorough
async def test_a_sharded_rank_moves_by_live_shadow(
    tmp_path: Path, redis: EmbeddedRedis, sharded_golden: Golden
) -> None:
    """Gathered parameters and scattered gradients are mirrored like any other output."""
    async with running(tmp_path, redis.url, faults=[PACE, NEVER_SENT], arguments=SHARDED) as run:
        await paced(run)
        await run.cluster.drain("h2")
        plan = await run.done("drain")
        run.let_go("between")

        assert plan.how == "live shadow"
        await run.ends_like(sharded_golden)


@pytest.mark.thorough
async def test_a_sharded_rank_moves_by_stop_and_copy(
    tmp_path: Path, redis: EmbeddedRedis, sharded_golden: Golden
) -> None:
    """The fallback carries shards, too."""
    async with running(
        tmp_path,
        redis.url,
        faults=[PACE],
        arguments=SHARDED,
        more_config="[shadow]\nenabled = false\n",
    ) as run:
        await paced(run)
        await run.cluster.drain("h2")
        plan = await run.done("drain")
        run.let_go("between")

        assert plan.how.startswith("stop-and-copy")
        assert plan.timings["copy_bytes"] > 0
        await run.ends_like(sharded_golden)


@pytest.mark.thorough
async def test_a_lost_shard_fails_the_job_with_the_reason(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """There are survivors and a standby; none of them has it."""
    faults = [PACE, "backward@1:9=kill", NEVER_SENT]
    arguments = (*SHARDED, "--snapshots", "0")
    async with running(tmp_path, redis.url, faults=faults, arguments=arguments) as run:
        view = await run.cluster.until(
            lambda v: bool(v.jobs) and v.jobs[0].state is JobState.FAILED, "the job has failed"
        )
        codes = await run.cluster.finished(30)

        assert run.fired("backward")
        assert "the state of rank 1 is lost without a replica" in view.jobs[0].detail
        assert "checkpoint" in view.jobs[0].detail
        assert all(codes[host] != 0 for host in ("h1", "h2", "h3"))


async def replaced(run: Run, point: str) -> MigrationPlan:
    """Let a rank end at ``point`` once it has a hot standby; returns the failover."""
    await run.shadowed()
    run.let_go("between")
    plan = await run.done("trainer")

    assert run.fired(point)
    assert (plan.kind, plan.phase) == (PlanKind.FAILOVER, Phase.DONE)
    return plan


async def test_a_lost_shard_survives_in_its_hot_standby(
    tmp_path: Path, redis: EmbeddedRedis, sharded_golden: Golden
) -> None:
    """Only the standby that shadowed the rank has its state."""
    faults = [PACE, "backward@2:120=kill", NEVER_SENT]
    async with running(
        tmp_path, redis.url, faults=faults, arguments=SHARDED, more_config=HOT
    ) as run:
        plan = await replaced(run, "backward")

        assert plan.moves[0].source is None
        assert plan.rollback is None
        await run.ends_like(sharded_golden, lost=1)


# The last step of a loop and its end; with an evaluation as each tenth step and after the loop: the
# step before one, an evaluation, the end of the loop, and the evaluation after it.
@pytest.mark.thorough
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize(
    ("every", "step", "epochs"),
    [
        (0, 59, 1),
        (0, 60, 2),
        (10, 59, 1),
        (10, 60, 1),
        (10, 66, 1),
        (10, 66, 2),
        (10, 67, 2),
    ],
)
async def test_a_rank_is_lost_after_a_vote_whose_outcome_others_know(
    every: int, step: int, epochs: int, sharded: bool, tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """They go on, to an evaluation or out of the loop, and the hot standby cannot know it."""
    arguments = ["--steps", "60", "--epochs", str(epochs), "--evaluate", str(every)]
    faults = [PACE, f"after-vote@2:{step}=kill"]
    if sharded:
        arguments += ["--sharded", "--snapshots", "0"]
        faults.append(NEVER_SENT)
    (tmp_path / "golden").mkdir()
    golden = golden_of(tmp_path / "golden", arguments)
    async with running(
        tmp_path, redis.url, faults=faults, arguments=arguments, more_config=HOT
    ) as run:
        plan = await replaced(run, "after-vote")

        assert plan.resume is not None
        await run.ends_like(golden, lost=1, unwritten=[(2, plan.resume - 1)])
