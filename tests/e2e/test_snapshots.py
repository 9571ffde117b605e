"""A unique state is lost: all ranks return to a snapshot and compute the same numbers again."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.harness import PACE, ROOT, Golden, Run, running
from tests.e2e.spread import built, drained, spread, undisturbed
from tmd.core.values.model import JobState, MigrationPlan, Phase, PlanKind
from tmd.demo.cluster import workers
from tmd.embedded import EmbeddedRedis
from tmd.testing.clients import until
from tmd.trainer.state.divided import NOT_SHADOWED

BREAKING = str(ROOT / "tests" / "e2e" / "scripts" / "breaking_script.py")
SHARDED = ("--steps", "60", "--sharded")
TORN, DEADLY = "broadcast-2", "broadcast-3"
"""Some parameters were broadcast to all ranks, others were not."""

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture(scope="module")
def sharded_golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return golden_of(tmp_path_factory.mktemp("snapshot_golden"), SHARDED)


def repeated(run: Run) -> set[int]:
    """Steps that a rank has committed more than once, each time with the same loss."""
    losses: dict[tuple[int, int], list[str]] = defaultdict(list)
    for file in run.cluster.trace.glob("*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            if "loss" in line:
                losses[line["rank"], line["step"]].append(line["loss"])
    assert all(len(set(found)) == 1 for found in losses.values())
    return {step for (_, step), found in losses.items() if len(found) > 1}


def rolled_back(run: Run, plan: MigrationPlan) -> int:
    """The step that all returned to; the plan reports the number of repeats."""
    assert (plan.kind, plan.phase) == (PlanKind.FAILOVER, Phase.DONE)
    assert plan.rollback is not None
    step, repeats = plan.rollback.step, plan.rollback.repeats
    assert plan.resume == step
    assert repeated(run) == set(range(step, step + repeats))
    return step


async def test_a_lost_shard_is_restored_from_its_keeper(
    tmp_path: Path, redis: EmbeddedRedis, sharded_golden: Golden
) -> None:
    """kill -9 in the middle of a step: its copy was on another host, all others have their own."""
    faults = [PACE, "forward@1:27=kill"]
    arguments = (*SHARDED, "--wary")
    async with running(tmp_path, redis.url, faults=faults, arguments=arguments) as run:
        plan = await run.done("trainer")
        assert run.fired("forward")
        await run.ends_like(sharded_golden, lost=1)

        assert rolled_back(run, plan) > 0
        assert plan.rollback is not None
        assert plan.rollback.step + plan.rollback.repeats == 27
        # On any host: the leader.
        assert any(plan.rollback.sentence in run.cluster.log(h) for h in ("h1", "h2", "h3", "s1"))


@pytest.mark.thorough
async def test_a_torn_snapshot_falls_back_to_the_previous_one(
    tmp_path: Path, redis: EmbeddedRedis, sharded_golden: Golden
) -> None:
    """The lost rank had sent half of its copy."""
    faults = [PACE, "bringing-30@2:*=kill"]
    async with running(tmp_path, redis.url, faults=faults, arguments=SHARDED) as run:
        plan = await run.done("trainer")
        assert run.fired("bringing-30")
        await run.ends_like(sharded_golden, lost=1)

        assert 0 < rolled_back(run, plan) < 30


@pytest.mark.thorough
async def test_a_joiner_that_dies_during_a_rollback_is_replaced(
    tmp_path: Path, redis: EmbeddedRedis, sharded_golden: Golden
) -> None:
    """The next standby fetches the same copy."""
    faults = [PACE, "backward@1:27=kill", "putting-back@1:*=kill"]
    async with running(
        tmp_path, redis.url, faults=faults, standby=("s1", "s2"), arguments=SHARDED
    ) as run:
        plan = await run.done("trainer")
        assert run.fired("putting-back")
        await run.ends_like(sharded_golden, lost=2)

        assert len({*plan.dead, *plan.rejected}) == 2
        assert rolled_back(run, plan) > 0


async def test_without_the_keeper_the_job_reports_the_lost_state(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """The copies of rank 1 were on the host of rank 2, and no other state replaces them."""
    faults = [PACE, "backward@1:27=kill", "forward@2:27=kill"]
    async with running(
        tmp_path, redis.url, faults=faults, standby=("s1", "s2"), arguments=SHARDED
    ) as run:
        view = await run.cluster.until(
            lambda v: bool(v.jobs) and v.jobs[0].state is JobState.FAILED, "the job has failed"
        )

        assert run.fired("backward")
        assert run.fired("forward")
        assert "the state of rank 1" in view.jobs[0].detail
        assert "or a complete snapshot" in view.jobs[0].detail
        assert "checkpoint" in view.jobs[0].detail


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["both", "single"])
async def test_a_host_with_unique_states_is_lost(
    layout: str, tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """Tensor parallel and sharded, or stages of a pipeline; two ranks on each host, one of which
    has moved before: the copies follow the ranks."""
    golden = undisturbed(tmp_path, layout)
    async with spread(tmp_path, redis, layout) as run:
        moved = await drained(run)
        await run.lose("h1")
        plan = (await run.plans(2))[1]
        await run.ends_like(golden, lost=1)

        assert moved.how == "live shadow"
        assert [m.rank for m in plan.moves] == [0, 1]
        assert rolled_back(run, plan) > 0


@pytest.mark.thorough
async def test_a_host_with_a_divided_optimizer_moves_and_is_lost(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """The state is copied at the switch, with the reason; then all return to a snapshot."""
    async with spread(tmp_path, redis, "zero") as run:
        moved = await drained(run)
        await run.lose("h1")
        lost = (await run.plans(2))[1]
        await run.ends_like(undisturbed(tmp_path, "zero"), lost=1)

        assert [m.rank for m in moved.moves] == [2, 3]
        assert moved.how == f"stop-and-copy: {NOT_SHADOWED}"
        assert built(run, "s1") == [2, 3, 3]
        assert [m.rank for m in lost.moves] == [0, 1]
        rolled_back(run, lost)


@pytest.mark.thorough
async def test_a_step_is_torn_after_its_vote_and_then_another_by_a_loss(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """Both steps count on ranks with torn parameters. Without a lost rank all continue once the
    owners have broadcast again; else all return to a snapshot."""
    faults = f"{TORN}@2:12=isolate", f"{DEADLY}@1:27=kill"
    async with spread(tmp_path, redis, "zero", *faults) as run:
        torn, lost = await run.plans(2)
        await run.ends_like(undisturbed(tmp_path, "zero"), lost=1)

        assert run.fired(TORN)
        assert (torn.kind, torn.phase, torn.moves) == (PlanKind.FAILOVER, Phase.DONE, ())
        assert (torn.rollback, torn.resume) == (None, 13)
        assert run.fired(DEADLY)
        assert [m.rank for m in lost.moves] == [1]
        back = rolled_back(run, lost)
        assert lost.rollback is not None
        assert back + lost.rollback.repeats == 28


async def test_no_job_returns_to_before_a_break(tmp_path: Path, redis: EmbeddedRedis) -> None:
    """A rank dies while all are behind a loop that they have left. The others would train the state
    of an earlier step on batches of the next loop."""
    gates = [f"rank-{rank}" for rank in range(3)]
    faults = [f"{gate} forward@{rank}:20=wait" for rank, gate in enumerate(gates)]
    async with running(
        tmp_path, redis.url, faults=faults, script=BREAKING, arguments=("--sharded",)
    ) as run:
        for gate in gates:
            await run.reached(gate)
        await run.cluster.until(
            lambda v: [w.step for w in workers(v) if w.rank is not None] == [20] * 3,
            "the hosts have reported",
        )
        await run.kill(1)
        await until(lambda: all('"Hold"' in run.cluster.log(h) for h in ("h1", "h3")))
        for gate in gates:
            run.let_go(gate)
        view = await run.cluster.until(
            lambda v: bool(v.jobs) and v.jobs[0].state is JobState.FAILED, "the job has failed"
        )

        assert "or a complete snapshot" in view.jobs[0].detail
