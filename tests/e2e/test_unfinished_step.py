"""A rank with a hot standby is lost in the middle of a step: the job finishes that step."""

from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.harness import HOT, LONG, NEVER_SENT, PACE, SCRIPT, Golden, Run, running
from tests.e2e.spread import undisturbed, with_hot_standby
from tests.e2e.test_hot_standby import hot, with_hot
from tests.e2e.test_rich import RICH
from tests.marks import thorough
from tmd.core.values.model import MigrationPlan, Phase, PlanKind
from tmd.demo.cluster import workers
from tmd.demo.report import read_trace
from tmd.embedded import EmbeddedRedis

FOLLOWED = 1
"""The rank that the hot standby follows: not rank 2, which its script got when it began."""


async def lost_in_step(run: Run, rank: int = FOLLOWED) -> MigrationPlan:
    """Kill the worker of ``rank``, which the fault "hold" stops in step 120, once its standby is in
    that step."""
    await run.shadowed()
    for held in ("between", "data"):
        run.let_go(held)
    await run.reached("hold")
    await run.cluster.until(
        lambda v: any(w.rank is None and w.step == 120 for w in workers(v)),
        "the standby is in step 120",
    )
    await run.kill(rank)
    return await run.done("trainer")


async def lost_in_backward(run: Run) -> tuple[MigrationPlan, int]:
    """The same for whichever rank the hot standby follows, in its backward pass."""
    view = await run.shadowed()
    (followed,) = [w.shadow.rank for w in workers(view) if w.shadow and w.shadow.verified]
    run.order(f"hold backward@{followed}:120=wait")
    return await lost_in_step(run, followed), followed


@pytest.mark.parametrize(
    ("point", "arguments"),
    [
        thorough("forward", ()),
        thorough("forward", ("--leave-early",)),
        ("backward", ()),
        thorough("before-vote", ()),
        thorough("backward", ("--leave-early",)),
        thorough("in-vote", ()),
    ],
)
async def test_no_step_is_repeated(
    point: str,
    arguments: tuple[str, ...],
    tmp_path: Path,
    redis: EmbeddedRedis,
    long_golden: Golden,
) -> None:
    """The survivors keep what they have computed in it, and every number is that of an undisturbed
    run. With --leave-early, too, a step that can be finished is finished."""
    faults = [f"hold {point}@{FOLLOWED}:120=wait", NEVER_SENT]
    async with with_hot(tmp_path, redis, *faults, standby=("s1",), arguments=arguments) as run:
        plan = await lost_in_step(run)

        assert (plan.kind, plan.phase, plan.resume) == (PlanKind.FAILOVER, Phase.DONE, 120)
        await run.ends_like(long_golden, lost=1)
        assert read_trace(run.cluster.trace).undone == ()


@pytest.mark.parametrize(
    ("lost", "late"),
    [("data", "backward@0"), thorough("forward", "data@2"), thorough("between", "backward@0")],
)
async def test_a_worker_that_has_not_begun_the_step_takes_part_in_it(
    lost: str, late: str, tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """The standby, whose rank was the last to begin, or a survivor."""
    faults = [f"hold {lost}@{FOLLOWED}:120=wait", f"other {late}:120=wait", NEVER_SENT]
    async with with_hot(tmp_path, redis, *faults, standby=("s1",)) as run:
        await run.shadowed()
        for held in ("between", "data"):
            run.let_go(held)
        await run.reached("hold")
        await run.reached("other")
        await run.kill(FOLLOWED)
        run.let_go("other")
        plan = await run.done("trainer")

        assert plan.resume == 120
        await run.ends_like(long_golden, lost=1)
        assert read_trace(run.cluster.trace).undone == ()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "path"),
    [((*LONG, "--sharded"), SCRIPT), ((*LONG, "--halves"), SCRIPT), (LONG, RICH)],
    ids=["FSDP2", "halves", "rich"],
)
async def test_other_scripts_go_on(
    arguments: tuple[str, ...], path: str, tmp_path: Path, redis: EmbeddedRedis, compiler: None
) -> None:
    """FSDP2: each state exists once. halves: operations in several groups. rich: a GradScaler,
    accumulation and clipping."""
    golden = golden_of(tmp_path, arguments, script=path)
    async with running(
        tmp_path / "run",
        redis.url,
        faults=[PACE],
        more_config=HOT,
        arguments=arguments,
        script=path,
    ) as run:
        await lost_in_backward(run)

        await run.ends_like(golden, lost=1)
        assert read_trace(run.cluster.trace).undone == ()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "goes_on"),
    [
        ("compiled", True),
        ("hybrid", True),
        ("tensor", True),
        ("experts", True),
        ("both", True),
        # Stages exchange messages, which cannot be exchanged again.
        ("pipeline", False),
    ],
)
async def test_layouts_go_on_or_repeat(
    layout: str, goes_on: bool, tmp_path: Path, redis: EmbeddedRedis, compiler: None
) -> None:
    """Each with the same numbers as an undisturbed job."""
    golden = undisturbed(tmp_path, layout)
    async with with_hot_standby(tmp_path, redis, layout) as run:
        plan, followed = await lost_in_backward(run)

        assert [m.rank for m in plan.moves] == [followed]
        await run.ends_like(golden, lost=1)
        assert (read_trace(run.cluster.trace).undone == ()) is goes_on


@pytest.mark.parametrize("who", ["standby", thorough("0"), thorough("2")])
async def test_a_second_loss_while_the_step_is_taken_up(
    who: str, tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """The standby or a survivor dies before it enters the new epoch: the step is repeated."""
    faults = [f"hold backward@{FOLLOWED}:120=wait"]
    async with with_hot(tmp_path, redis, *faults, standby=("s1", "s2", "s3")) as run:
        view = await run.shadowed()
        (shadow,) = [w for w in workers(view) if w.shadow and w.shadow.verified]
        victim = shadow.worker.partition("/")[0] if who == "standby" else who
        run.order(f"finishing@{victim}:*=kill")
        await lost_in_step(run)

        assert run.fired("finishing")
        await run.ends_like(long_golden, lost=2)
        assert read_trace(run.cluster.trace).undone


@pytest.mark.parametrize("point", ["after-vote", thorough("optimizer")])
async def test_a_loss_between_two_steps(
    point: str, tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """The survivors are in the next step when they notice it; the standby may not be yet."""
    faults = [f"{point}@{FOLLOWED}:120=kill"]
    async with with_hot(tmp_path, redis, *faults, standby=("s1",)) as run:
        await hot(run)
        plan = await run.done("trainer")

        assert run.fired(point)
        assert plan.resume in (120, 121)
        await run.ends_like(long_golden, lost=1, unwritten=[(FOLLOWED, 120)])


async def test_a_standby_that_has_heard_nothing_since_the_last_gradients_goes_on(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """Its rank has voted, and is killed before it sends its standby what it received just before
    the vote. The standby has all gradients of the step, and takes it for committed, as survivors
    do."""
    faults = [f"telling-120@{FOLLOWED}:*=wait", f"hold after-vote@{FOLLOWED}:120=wait", NEVER_SENT]
    async with with_hot(tmp_path, redis, *faults, standby=("s1",)) as run:
        await hot(run)
        for point in ("telling-120", "hold"):
            await run.reached(point)
        await run.kill(FOLLOWED)
        plan = await run.done("trainer")

        assert plan.resume == 121
        await run.ends_like(long_golden, lost=1, unwritten=[(FOLLOWED, 120)])
        assert read_trace(run.cluster.trace).undone == ()
