"""Jobs whose collectives inner groups carry: built beside training, switched, and built anew."""

from pathlib import Path

import pytest

from tests.e2e.harness import LONG, PACE, Golden, Run, history, live_plan, running, weights_of
from tests.marks import thorough
from tmd import embedded
from tmd.core.values.model import Activity, Phase, PlanKind
from tmd.demo.cluster import workers
from tmd.demo.report import read_trace
from tmd.embedded import EmbeddedRedis

GATE = "data@0:5=wait"
"""Rank 0 waits here, and so do all ranks, until a drain was requested."""


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """tmd's own algorithms behind generations, in all processes of a test."""
    monkeypatch.setenv("TMD_CPU", "ring")


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMD_CPU", "gloo")


async def drain_requested(run: Run) -> None:
    """Drain rank 1's host, and let the job run."""
    await run.reached("data")
    await run.cluster.until(
        lambda v: any(w.activity is Activity.STANDBY for w in workers(v)), "a standby waits"
    )
    await run.cluster.drain("h2")
    await run.in_phase(Phase.PREPARE)
    run.let_go("data")


async def steps_after(run: Run, count: int) -> None:
    """Wait until rank 0 has committed ``count`` more steps."""

    def step(view: object) -> int:
        return max((w.step for w in workers(view) if w.rank == 0), default=0)  # type: ignore[arg-type]

    first = step(await run.cluster.view())
    await run.cluster.until(lambda v: step(v) >= first + count, f"{count} more steps")


@pytest.mark.usefixtures("ring")
@pytest.mark.parametrize("place", ["backward", thorough("forward"), thorough("in-vote")])
async def test_a_loss_builds_all_groups_anew(
    place: str, tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    faults = [f"{place}@1:8=kill", "building-2@*:*=pace"]
    async with running(tmp_path, redis.url, faults=faults) as run:
        plan = await run.done()

        assert run.fired(place)
        assert run.fired("building-2")
        assert plan.kind is PlanKind.FAILOVER
        run.let_go("building-2")
        await run.ends_like(golden, lost=1)


@pytest.mark.usefixtures("ring")
async def test_a_move_waits_for_its_groups_and_training_does_not(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """The joiner's build takes long: no rank that stays arms, and all train on."""
    faults = [GATE, PACE, "building-2@s1:*=wait"]
    async with running(tmp_path, redis.url, faults=faults, arguments=LONG) as run:
        await drain_requested(run)
        await run.reached("building-2")
        view = await run.in_phase(Phase.READY)
        await steps_after(run, 5)
        plan = live_plan(await run.cluster.view())
        run.let_go("building-2")
        done = await run.done("drain")

        assert plan is not None
        leavers = {move.leaver.worker for move in plan.moves}  # they have nothing to build
        assert not any(w.armed for w in workers(view) if w.worker not in leavers)
        assert plan.phase is Phase.READY
        assert done.id == plan.id
        await run.ends_like(long_golden)


@pytest.mark.usefixtures("ring")
async def test_a_rank_that_cannot_build_drops_the_move(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """It says why at once; training does not notice, and the move is tried again."""
    faults = [GATE, PACE, "building-2@0:*=raise", "forward@1:60=wait"]
    async with running(tmp_path, redis.url, faults=faults, arguments=LONG) as run:
        await drain_requested(run)
        first, *_ = await run.plans(1)
        await run.cluster.until(lambda v: live_plan(v) is not None, "it is tried again")
        run.let_go("forward")  # the second attempt needs steps, too
        done = await run.done("drain")

        assert run.fired("building-2")
        assert first.phase is Phase.ABORTED
        assert "rank 0 cannot switch" in first.outcome
        assert done.kind is PlanKind.PLANNED
        await run.ends_like(long_golden)


@pytest.mark.usefixtures("ring")
@pytest.mark.thorough
@pytest.mark.parametrize("who", ["s1", "0"])
async def test_a_death_while_groups_are_built_beside_training(
    who: str, tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """Of the joiner: the next standby. Of a rank that stays: a failover."""
    faults = [GATE, PACE, f"building-2@{who}:*=kill"]
    async with running(
        tmp_path, redis.url, faults=faults, arguments=LONG, standby=("s1", "s2")
    ) as run:
        await drain_requested(run)
        done = await run.done("drain" if who == "s1" else "trainer")

        assert run.fired("building-2")
        assert history(await run.cluster.view())[0].phase is Phase.ABORTED
        assert done.kind is (PlanKind.PLANNED if who == "s1" else PlanKind.FAILOVER)
        await run.ends_like(long_golden, lost=1)


async def golden_with_groups(folder: Path, *arguments: str) -> Golden:
    """A job without faults. ``golden_of`` has no inner groups, and sums in another order."""
    with embedded.redis() as redis:
        async with running(folder, redis.url, standby=(), arguments=arguments) as run:
            assert set((await run.cluster.finished(60)).values()) == {0}
            return Golden(read_trace(run.cluster.trace), weights_of(run.cluster.trace))


@pytest.mark.usefixtures("gloo")
@pytest.mark.thorough
async def test_a_job_on_gloo_resumes_with_the_same_numbers(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """The order in which Gloo sums an element depends on its place in a bucket."""
    saves = ("--checkpoints", str(tmp_path / "c"), "--steps", "25")
    await golden_with_groups(tmp_path / "before", *saves)
    golden = await golden_with_groups(tmp_path / "undisturbed")
    resumes = (*saves[:2], "--steps", "40")
    async with running(tmp_path / "after", redis.url, standby=(), arguments=resumes) as run:
        await run.ends_like(golden, unwritten={(r, s) for r in range(3) for s in range(20)})

        assert min(step for _, step in read_trace(run.cluster.trace).commits) == 20


@pytest.mark.usefixtures("gloo")
@pytest.mark.thorough
async def test_a_rank_is_lost_on_gloo_before_the_very_first_step(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """If the standby called other collectives than the survivors, Gloo would hang."""
    golden = await golden_with_groups(tmp_path / "undisturbed")
    gates = [f"{rank} loop@{rank}:0=wait" for rank in range(3)]
    faults = [*gates, "dies data@1:0=kill"]
    async with running(tmp_path / "lost", redis.url, faults=faults) as run:
        plan = await run.lost_before_a_step("1", "0", "2")

        assert run.fired("dies")
        assert plan.resume == 0
        await run.ends_like(golden, lost=1)


@pytest.mark.usefixtures("gloo")
async def test_a_shadow_follows_ranks_whose_collectives_gloo_carries(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """The outputs of an inner group are mirrored. Gloo sums in another order than tmd, so the
    oracle is an undisturbed job on Gloo."""
    golden = await golden_with_groups(tmp_path / "undisturbed", *LONG)
    faults = [GATE, PACE, "receiving@*:*=kill", "passing@*:*=pace"]
    async with running(tmp_path, redis.url, faults=faults, arguments=LONG) as run:
        await drain_requested(run)
        plan = await run.done("drain")
        run.let_go("passing")

        assert run.fired("passing")
        assert not run.fired("receiving"), "it got the state as a live shadow"
        assert plan.kind is PlanKind.PLANNED
        assert "live shadow" in plan.how
        await run.ends_like(golden)


@pytest.mark.usefixtures("ring")
@pytest.mark.thorough
async def test_a_build_during_which_no_step_is_committed_is_made_at_the_next_switch(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """Nobody knows whether it keeps the rank from training, so that the move is dropped. The next
    one builds while no rank trains."""
    faults = [GATE, PACE, "building-2@s1:*=wait", "forward@1:30=wait", "backward@1:60=wait"]
    async with running(tmp_path, redis.url, faults=faults, arguments=LONG) as run:
        await drain_requested(run)
        await run.reached("building-2")
        await run.reached("forward")
        first, *_ = await run.plans(1)
        run.let_go("building-2")
        run.let_go("forward")
        await run.cluster.until(lambda v: live_plan(v) is not None, "it is tried again")
        run.let_go("backward")  # the second attempt needs steps, too
        done = await run.done("drain")

        assert first.phase is Phase.ABORTED
        assert "no step was committed for" in first.outcome
        assert "no step was committed for" in done.builds_at_switch
        assert "inner groups are built at the switch" in done.how
        await run.ends_like(long_golden)


@pytest.mark.usefixtures("ring")
async def test_groups_are_built_at_the_switch_where_the_environment_says_so(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No group is built before the vote."""
    monkeypatch.setenv("TMD_BUILD", "switch")
    faults = [GATE, PACE, "building-2@*:*=wait"]
    async with running(tmp_path, redis.url, faults=faults, arguments=LONG) as run:
        await drain_requested(run)
        await run.reached("building-2")
        await run.cluster.until(
            lambda v: any(w.activity is Activity.LEFT for w in workers(v)), "the vote switched"
        )
        run.let_go("building-2")
        plan = await run.done("drain")

        assert "inner groups are built at the switch" in plan.how
        assert "TMD_BUILD=switch" in plan.builds_at_switch
        await run.ends_like(long_golden)


@pytest.mark.usefixtures("ring")
@pytest.mark.thorough
async def test_a_rank_that_cannot_build_at_the_switch_makes_all_build_anew(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks have switched by then: the step is run again with the groups of another epoch."""
    monkeypatch.setenv("TMD_BUILD", "switch")
    faults = [GATE, PACE, "building-2@0:*=raise", "building-3@*:*=pace"]
    async with running(tmp_path, redis.url, faults=faults, arguments=LONG) as run:
        await drain_requested(run)
        await run.reached("building-3")
        run.let_go("building-3")

        assert run.fired("building-2")
        await run.ends_like(long_golden)
