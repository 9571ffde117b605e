"""Standbys that shadow a rank without a planned move: hot ones, and rehearsals."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.e2e.harness import HOT, LONG, NEVER_SENT, PACE, Golden, Run, history, running
from tests.marks import thorough
from tmd.core.planning.links import LINK_BROKEN
from tmd.core.values.model import Activity, ClusterView, Phase, PlanKind
from tmd.demo.cluster import workers
from tmd.embedded import EmbeddedRedis

GATE = "data@0:100=wait"
"""Rank 0 waits here at the latest."""


async def hot(run: Run) -> None:
    """Wait until a standby shadows a rank with equal digests, then let the job run."""
    await run.shadowed()
    let_go(run)


def gated(
    folder: Path,
    redis: EmbeddedRedis,
    *arguments: str,
    faults: Sequence[str] = (),
    standby: Sequence[str] = ("s1", "s2"),
    more_config: str = "",
    rehearse: bool = False,
) -> AbstractAsyncContextManager[Run]:
    """A run of the long job that waits at its gate."""
    return running(
        folder,
        redis.url,
        faults=[PACE, GATE, *faults],
        standby=standby,
        arguments=(*LONG, *arguments),
        rehearse=rehearse,
        more_config=more_config,
    )


def with_hot(
    folder: Path,
    redis: EmbeddedRedis,
    *faults: str,
    standby: Sequence[str] = ("s1", "s2"),
    arguments: Sequence[str] = (),
) -> AbstractAsyncContextManager[Run]:
    """The same, in which one standby is hot."""
    return gated(folder, redis, *arguments, faults=faults, standby=standby, more_config=HOT)


def let_go(run: Run) -> None:
    """Let the job run without pauses."""
    run.let_go("between")
    run.let_go("data")


# Rank 2 is the one that is shadowed; rank 1 is a replica, with buffers of its own.
@pytest.mark.parametrize(
    ("rank", "point", "end"),
    [
        (1, "backward", "kill"),
        thorough(2, "after-vote", "kill"),
        thorough(2, "backward", "linger"),
    ],
)
async def test_a_loss_with_a_hot_standby_copies_no_state(
    rank: int, point: str, end: str, tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """In the middle of a step, and right after a vote whose outcome others may know."""
    faults = [f"{point}@{rank}:120={end}"]
    if point == "backward":
        faults.append(NEVER_SENT)
    async with with_hot(tmp_path, redis, *faults, standby=("s1",)) as run:
        await hot(run)
        plan = await run.done("trainer")

        assert run.fired(point)
        assert plan.kind is PlanKind.FAILOVER
        assert [m.rank for m in plan.moves] == [rank]
        await run.ends_like(long_golden, lost=1, unwritten=[(rank, 120)])


@pytest.mark.parametrize("who", [("0:+",), thorough(("s1:*", "s2:*"))], ids=["survivor", "standby"])
async def test_either_side_may_die_during_the_comparison(
    who: tuple[str, ...], tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """While the digest is computed, in the rest of the broken step: the survivor, or the hot
    standby, whose host is not known in advance."""
    faults = ["backward@2:120=kill", *(f"comparing-120@{w}=kill" for w in who)]
    async with with_hot(tmp_path, redis, *faults) as run:
        await hot(run)
        await run.done("trainer")

        assert run.fired("comparing-120")
        await run.ends_like(long_golden, lost=2)


async def on_trust(run: Run) -> ClusterView:
    """Wait until the hot standby takes part in the broken step, before any comparison."""
    await hot(run)
    await run.reached("proving")
    await run.in_phase(Phase.RESUME)
    return await run.cluster.until(
        lambda v: sum(w.activity is Activity.TRAINING and w.epoch == 2 for w in workers(v)) == 3,
        "all train in the new epoch",
    )


async def test_a_worker_with_a_state_on_trust_does_not_vote(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """The survivor of the comparison dies first: the step is repeated, and the rank is given to
    another worker, with a copy of a verified state."""
    async with with_hot(tmp_path, redis, "backward@2:120=kill", "proving@0:+=wait") as run:
        await on_trust(run)
        await run.kill(0)
        first, second = await run.plans(2)

        assert (first.resume, second.resume) == (120, 120)
        assert [m.rank for m in second.moves] == [0, 2]
        (record,) = (await run.cluster.view()).jobs
        assert all(m.source and m.source == record.membership.members[1] for m in second.moves)
        await run.ends_like(long_golden, lost=2)


@pytest.mark.thorough
async def test_the_next_loss_ends_a_comparison(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """The survivor that hangs in it is still alive."""
    async with with_hot(tmp_path, redis, "backward@2:120=kill", "proving@0:+=wait") as run:
        await on_trust(run)
        await run.kill(1)
        plans = await run.plans(2)
        run.let_go("proving")

        assert [p.resume for p in plans] == [120, 120]
        assert [m.rank for m in plans[1].moves] == [1, 2]
        await run.ends_like(long_golden, lost=2)


async def test_a_refuted_state_is_copied(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """One bit flips in the hot standby after its last digest: its step is not committed."""
    faults = "backward@2:120=kill", "comparing-120@s1:*=flip"
    async with with_hot(tmp_path, redis, *faults, standby=("s1",)) as run:
        await hot(run)
        first, second = await run.plans(2)

        assert run.fired("comparing-120")
        assert (first.resume, second.resume) == (120, 120)
        assert second.cause == LINK_BROKEN
        (move,) = second.moves
        assert move.joiner == move.leaver == first.moves[0].joiner
        await run.ends_like(long_golden, lost=1)


@pytest.mark.thorough
async def test_a_hot_standby_that_dies_is_replaced(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """Training is not affected."""
    async with with_hot(tmp_path, redis, "shadowing@*:*=kill") as run:
        await run.reached("shadowing")
        await hot(run)

        assert history(await run.cluster.view()) == ()
        await run.ends_like(long_golden, lost=1)


@pytest.mark.thorough
async def test_a_drain_leaves_the_hot_standby_to_its_rank(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """There is another standby, and enough time."""
    async with with_hot(tmp_path, redis, NEVER_SENT) as run:
        view = await run.cluster.until(
            lambda v: {Activity.IN_STEP, Activity.STANDBY} <= {w.activity for w in workers(v)},
            "one in step, the other one waits",
        )
        shadow = next(w.worker for w in workers(view) if w.activity is Activity.IN_STEP)
        await run.cluster.drain(view.jobs[0].membership.members[1].host)
        await run.in_phase(Phase.PREPARE)
        let_go(run)
        plan = await run.done("drain")

        assert plan.moves[0].joiner is not None
        assert plan.moves[0].joiner.worker != shadow
        await run.ends_like(long_golden)


async def test_every_standby_rehearses_once(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """One after the other; then they wait, and serve as usual."""
    async with gated(tmp_path, redis, rehearse=True) as run:
        verdicts = [verdict for _, verdict in await run.rehearsed(2)]
        let_go(run)

        assert all(v.has_shown and v.step > 0 for v in verdicts)
        assert history(await run.cluster.view()) == ()
        await run.ends_like(long_golden)


async def test_a_slow_standby_rehearses_a_recording(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """It could never shadow the step in time, but it computes the same bits."""
    slow, hasty = ("--slow-host", "s1"), "[shadow]\npatience_s = 0.4\n"
    async with gated(
        tmp_path, redis, *slow, standby=("s1",), more_config=hasty, rehearse=True
    ) as run:
        ((_, verdict),) = await run.rehearsed(1)
        let_go(run)

        assert verdict.has_shown, verdict
        await run.ends_like(long_golden)


async def test_a_standby_that_fails_its_rehearsal_never_gets_a_rank(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """It computes other gradients; the rank that is lost later goes to the other standby."""
    blind, kill = ("--blind-host", "s1"), ["backward@1:120=kill"]
    async with gated(tmp_path, redis, *blind, faults=kill, rehearse=True) as run:
        unfit = [(w, v) for w, v in await run.rehearsed(2) if v.refusal]
        let_go(run)
        plan = await run.done("trainer")

        ((worker, verdict),) = unfit
        assert worker.worker.partition("/")[0] == "s1"
        assert "computes other bits" in verdict.refusal
        assert verdict.suspect
        assert plan.moves[0].joiner is not None
        assert plan.moves[0].joiner.worker != worker.worker
        await run.ends_like(long_golden, lost=1)


@pytest.mark.thorough
async def test_a_standby_rehearses_again_on_request(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """Each request is answered once, even where standbys do not rehearse by themselves."""
    async with gated(tmp_path, redis, standby=("s1",)) as run:
        for _ in range(2):
            asked = await run.cluster.rehearse("s1")
            view = await run.cluster.until(
                lambda v, asked=asked: any(  # type: ignore[misc]
                    verdict.request == asked for w in workers(v) for verdict in w.rehearsed
                ),
                "the request is answered",
            )
            (verdict,) = next(w.rehearsed for w in workers(view) if w.rehearsed)
            assert verdict.refusal == ""
            assert verdict.step > 0
        let_go(run)
        assert history(await run.cluster.view()) == ()
        await run.ends_like(long_golden)
