"""Ranks whose groups do not span the world: a standby can become any of them."""

from pathlib import Path

import pytest

from tests.e2e.harness import STOP_AND_COPY, history
from tests.e2e.spread import (
    PER_HOST,
    RANKS,
    UNLIKE,
    built,
    drained,
    spread,
    undisturbed,
    with_hot_standby,
)
from tests.marks import thorough
from tmd.core.values.model import Activity, ClusterView, Phase, PlanKind
from tmd.demo.cluster import ready, workers
from tmd.embedded import EmbeddedRedis

GATE = "hold between@0:5=wait"
"""Rank 0 waits here, and so do all ranks."""

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.mark.parametrize(
    "layout",
    [
        "hybrid",
        thorough("tensor"),
        thorough("experts"),
        thorough("compiled"),
        thorough("inductor"),
        thorough("unlike"),
        thorough("pipeline"),
    ],
)
async def test_a_host_moves_and_then_another_is_lost(
    layout: str, tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """Both ranks of a host each time, whose groups differ from those that a standby builds."""
    golden = undisturbed(tmp_path, layout)
    async with spread(tmp_path, redis, layout) as run:
        moved = await drained(run)
        await run.lose("h1")
        lost = (await run.plans(2))[1]

        assert [m.rank for m in moved.moves] == [2, 3]
        assert moved.how == "live shadow"
        assert built(run, "s1") == ([2, 3, 3] if layout in UNLIKE else [])
        assert (lost.kind, lost.phase) == (PlanKind.FAILOVER, Phase.DONE)
        assert [m.rank for m in lost.moves] == [0, 1]
        await run.ends_like(golden, lost=1)


@pytest.mark.thorough
async def test_a_host_with_unique_states_moves(tmp_path: Path, redis: EmbeddedRedis) -> None:
    """Tensor parallel and sharded: there is no replica as a source."""
    golden = undisturbed(tmp_path, "both")
    async with spread(tmp_path, redis, "both") as run:
        moved = await drained(run)
        run.let_go("between")

        assert [m.rank for m in moved.moves] == [2, 3]
        assert moved.how == "live shadow"
        await run.ends_like(golden)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["unlike", "pipeline"])
async def test_a_host_is_lost_whose_ranks_no_standby_has_built(
    layout: str, tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """Both standbys are built for the last rank; one is rebuilt while the job waits."""
    golden = undisturbed(tmp_path, layout)
    async with spread(tmp_path, redis, layout) as run:
        await run.reached("between")
        await run.cluster.until(lambda v: ready(v, RANKS, PER_HOST), "all train, two stand by")
        await run.lose("h1")
        lost = (await run.plans(1))[0]

        assert (lost.kind, lost.phase) == (PlanKind.FAILOVER, Phase.DONE)
        assert lost.rollback is None
        assert built(run, "s1") == [0, 3, 3]
        await run.ends_like(golden, lost=1)


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 3], ids=["first stage", "last stage"])
async def test_a_stage_dies_between_two_microbatches(
    rank: int, tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """Messages of the broken step are in flight in both directions; none is taken for one of the
    repeated step."""
    golden = undisturbed(tmp_path, "pipeline")
    faults = GATE, f"backward@{rank}:20=kill"
    async with spread(tmp_path, redis, "pipeline", *faults) as run:
        await run.reached("hold")
        await run.cluster.until(lambda v: ready(v, RANKS, PER_HOST), "all train, two stand by")
        run.let_go("hold")
        run.let_go("between")
        lost = (await run.plans(1))[0]

        assert run.fired("backward")
        assert (lost.kind, lost.phase) == (PlanKind.FAILOVER, Phase.DONE)
        assert [m.rank for m in lost.moves] == [rank]
        assert lost.resume == 20
        await run.ends_like(golden, lost=1)


@pytest.mark.thorough
async def test_stages_move_by_stop_and_copy(tmp_path: Path, redis: EmbeddedRedis) -> None:
    """The fallback: a joiner is built for its stage before the state arrives."""
    golden = undisturbed(tmp_path, "pipeline")
    async with spread(tmp_path, redis, "pipeline", more_config=STOP_AND_COPY) as run:
        moved = await drained(run)
        run.let_go("between")

        assert moved.how == "stop-and-copy: the live shadow is switched off"
        assert built(run, "s1") == [2, 3, 3]
        await run.ends_like(golden)


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [0, 3], ids=["first stage", "last stage"])
async def test_a_stage_dies_in_the_very_first_step(
    rank: int, tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """In this step stages agree on their messages, which a joiner has done long before."""
    golden = undisturbed(tmp_path, "pipeline")
    # Both pipelines, which are independent until the backward pass has ended.
    gates = "one start@0:0=wait", "other start@2:0=wait"
    faults = *gates, f"backward@{rank}:0=kill"
    async with spread(tmp_path, redis, "pipeline", *faults) as run:
        await run.reached("one")
        await run.reached("other")
        await run.cluster.until(
            lambda v: sum(w.activity is Activity.STANDBY for w in workers(v)) == PER_HOST,
            "two stand by",
        )
        for held in ("one", "other", "between"):
            run.let_go(held)
        lost = (await run.plans(1))[0]

        assert run.fired("backward")
        assert (lost.kind, lost.phase) == (PlanKind.FAILOVER, Phase.DONE)
        await run.ends_like(golden, lost=1)


@pytest.mark.thorough
async def test_unique_stages_survive_in_their_hot_standbys(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """Each standby shadows a different stage, for which one of them was rebuilt."""
    golden = undisturbed(tmp_path, "single")
    async with spread(tmp_path, redis, "single", more_config="[shadow]\nhot = 2\n") as run:
        await run.cluster.until(
            lambda v: sum(bool(w.shadow and w.shadow.verified) for w in workers(v)) == PER_HOST,
            "two hot standbys",
        )
        await run.lose("h2")
        lost = await run.done()

        assert (lost.kind, lost.rollback) == (PlanKind.FAILOVER, None)
        assert [(m.rank, m.source) for m in lost.moves] == [(2, None), (3, None)]
        assert built(run, "s1") == [2, 3, 3]
        await run.ends_like(golden, lost=1)


@pytest.mark.thorough
async def test_a_standby_rehearses_each_stage_once_and_takes_either(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """Afterwards it waits, built for one of the two equally frequent stages, and takes a rank of
    the other one, whose rehearsal succeeded, too."""
    golden = undisturbed(tmp_path, "pipeline")
    gate = "hold between@0:120=wait"
    async with spread(
        tmp_path, redis, "pipeline", gate, "backward@1:125=kill", rehearse=True
    ) as run:
        view = await run.cluster.until(rehearsed, "both standbys have rehearsed both stages")
        waiting = [w for w in workers(view) if w.rank is None]
        told, before = run.cluster.log("s1"), built(run, "s1")
        run.let_go("hold")
        run.let_go("between")
        lost = (await run.plans(1))[0]

        for standby in waiting:
            assert [v.ranks for v in standby.rehearsed] == [(1, 3), (0, 2)]
            assert all(v.has_shown for v in standby.rehearsed)
            assert standby.serves == (0, 2)
        assert told.count('"directive": "ShadowRank"') == 2 * PER_HOST
        assert before == [0, 0, 3, 3]
        assert run.fired("backward")
        assert (lost.kind, lost.phase) == (PlanKind.FAILOVER, Phase.DONE)
        assert [m.rank for m in lost.moves] == [1]
        assert lost.choice[0].endswith("its host holds none, rehearsed")
        assert built(run, "s1") == [0, 0, 1, 3, 3]
        await run.ends_like(golden, lost=1)


@pytest.mark.thorough
async def test_an_idle_standby_settles_on_the_commonest_stage(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """The two middle ones of four stages have one role: it rehearses one of them, and waits so."""
    golden = undisturbed(tmp_path, "deep")
    async with spread(tmp_path, redis, "deep", rehearse=True) as run:
        view = await run.cluster.until(
            lambda v: rehearsed(v, 3) and all(w.serves == (2,) for w in workers(v) if w.rehearsed),
            "both standbys have rehearsed, and settled",
        )
        waiting = [w for w in workers(view) if w.rehearsed]

        for standby in waiting:
            assert [v.ranks for v in standby.rehearsed] == [(3,), (1, 2), (0,)]
            assert all(v.has_shown for v in standby.rehearsed)
        assert run.cluster.log("s1").count('"directive": "ShadowRank"') == 3 * PER_HOST
        assert built(run, "s1") == sorted([3, 1, 0, 2] * PER_HOST)
        await run.ends_like(golden)


def rehearsed(view: ClusterView, roles: int = 2) -> bool:
    """Two standbys have rehearsed all roles, and wait."""
    waiting = [w for w in workers(view) if w.activity is Activity.STANDBY]
    over = bool(view.jobs) and not view.jobs[0].shadows
    return over and len([w for w in waiting if len(w.rehearsed) == roles]) == PER_HOST


@pytest.mark.thorough
async def test_a_hot_standby_is_asked_for_a_rank_of_another_stage(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """It is the only one left, in a step that broke during its shadow: it drops the shadowed state
    and is rebuilt."""
    golden = undisturbed(tmp_path, "pipeline")
    async with with_hot_standby(tmp_path, redis, "pipeline") as run:
        view = await run.shadowed()
        await run.lose("h1")
        lost = await run.done()

        assert [w.shadow.rank for w in workers(view) if w.shadow] == [1]
        assert (lost.kind, lost.rollback) == (PlanKind.FAILOVER, None)
        assert [m.rank for m in lost.moves] == [0]
        assert built(run, "s1") == [0, 3]
        await run.ends_like(golden, lost=1)


@pytest.mark.thorough
async def test_a_hot_standby_takes_a_rank_that_is_no_replica_of_the_one_it_followed(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """It is the only one left. What it has shadowed has the same shapes, so that nothing but the
    copy of the state shows that it is another part of the model."""
    golden = undisturbed(tmp_path, "hybrid")
    async with with_hot_standby(tmp_path, redis, "hybrid") as run:
        view = await run.shadowed()
        (followed,) = [w.shadow.rank for w in workers(view) if w.shadow]
        other = next(w for w in workers(view) if w.rank is not None and followed not in w.replicas)
        await run.lose(other.worker.partition("/")[0])
        lost = await run.done()

        assert [m.rank for m in lost.moves] == [other.rank]
        assert len(history(await run.cluster.view())) == 1
        assert "one of them is corrupt" not in run.cluster.log("s1")
        await run.ends_like(golden, lost=1)
