"""More of ZeroRedundancyOptimizer: standbys that cannot take a part, and torn steps."""

from pathlib import Path

import pytest

from tests.e2e.harness import history
from tests.e2e.spread import PER_HOST, RANKS, spread, undisturbed
from tests.e2e.test_snapshots import DEADLY, TORN, rolled_back
from tmd.core.values.model import Phase
from tmd.demo.cluster import ready, workers
from tmd.demo.report import may_miss
from tmd.embedded import EmbeddedRedis
from tmd.trainer.state.divided import NOT_SHADOWED

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.mark.thorough
async def test_a_step_is_torn_after_a_vote_that_switches(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """The joiners already hold their ranks, from torn states: in the epoch of the switch, whose
    links are new, owners broadcast again. No rank halts for it."""
    faults = "gate between@0:5=wait", f"{TORN}@1:5=isolate"
    async with spread(tmp_path, redis, "zero", *faults) as run:
        await run.reached("gate")
        await run.cluster.until(lambda v: ready(v, RANKS, PER_HOST), "all train, two stand by")
        await run.cluster.drain("h2")
        await run.armed()
        run.let_go("gate")
        moved = await run.done("drain")
        view = await run.cluster.until(lambda v: ready(v, RANKS, PER_HOST), "h2 stands by")
        await run.ends_like(undisturbed(tmp_path, "zero"))

        assert run.fired(TORN)
        assert [m.rank for m in moved.moves] == [2, 3]
        assert history(view) == (moved,)
        assert {m.host for m in view.jobs[0].membership.members} == {"h1", "s1"}


@pytest.mark.thorough
async def test_a_divided_optimizer_is_restored_from_replicas(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """Divided in pairs, each a replica of the other: no rank returns to a snapshot, and the rank
    that lost its peers during the broadcasts is repaired in the next epoch."""
    golden = undisturbed(tmp_path, "pairs")
    async with spread(tmp_path, redis, "pairs", f"{TORN}@1:27=kill") as run:
        lost = await run.done("trainer")
        await run.ends_like(golden, lost=1, unwritten=may_miss([lost]))

        assert run.fired(TORN)
        assert [m.rank for m in lost.moves] == [1]
        assert (lost.rollback, lost.resume) == (None, 28)


@pytest.mark.thorough
async def test_a_standby_that_cannot_rebuild_is_refused_another_part(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """It is refused with the remedy, and the job continues undisturbed."""
    async with spread(tmp_path, redis, "once") as run:
        await run.reached("between")
        await run.cluster.until(lambda v: ready(v, RANKS, PER_HOST), "all train, two stand by")
        await run.cluster.drain("h2")
        (plan,) = await run.plans(1)
        await run.ends_like(undisturbed(tmp_path, "zero"))

        assert plan.phase is Phase.ABORTED
        assert "build model and optimizer in session.build(function)" in plan.outcome
        assert "a standby can take only the last rank" in run.cluster.log("h1")


@pytest.mark.thorough
async def test_a_hot_standby_cannot_shadow_a_divided_optimizer(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """It reports that, and serves as any other. An average of torn parameters is undone, too."""
    golden = undisturbed(tmp_path, "averaged")
    faults, hot = f"{DEADLY}@1:27=kill", "[shadow]\nhot = 1\n"
    async with spread(tmp_path, redis, "averaged", faults, more_config=hot) as run:
        lost = await run.done("trainer")
        await run.cluster.until(
            lambda v: any(said.note == NOT_SHADOWED for w in workers(v) for said in w.rehearsed),
            "a standby says why it does not follow",
        )
        await run.ends_like(golden, lost=1)

        assert run.fired(DEADLY)
        assert [m.rank for m in lost.moves] == [1]
        rolled_back(run, lost)
