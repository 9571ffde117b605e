"""Scripts whose weights change besides by an optimizer, as those of a momentum encoder do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.harness import HOT, LONG, NEVER_SENT, PACE, PACE_OF_2, RANKS, Golden, running
from tests.marks import thorough
from tmd.demo.cluster import workers
from tmd.embedded import EmbeddedRedis

SCRIPT = str(Path(__file__).parent / "scripts" / "moving_script.py")


Job = tuple[tuple[str, ...], Golden]


@pytest.fixture(
    params=["", *map(thorough, ("--sam", "--average", "--evaluate"))],
    ids=["momentum", "sam", "average", "evaluation"],
    scope="module",
)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return arguments_and_golden(tmp_path_factory, request.param)


def arguments_and_golden(folders: pytest.TempPathFactory, *options: str) -> Job:
    arguments = (*LONG, *filter(None, options))
    return arguments, golden_of(folders.mktemp("golden"), arguments, len(RANKS), SCRIPT)


@pytest.mark.parametrize("rehearse", [True, thorough(False)])
async def test_a_rank_moves_and_another_is_lost(
    rehearse: bool, job: Job, tmp_path: Path, redis: EmbeddedRedis
) -> None:
    arguments, golden = job
    async with running(
        tmp_path,
        redis.url,
        faults=[PACE_OF_2],
        script=SCRIPT,
        arguments=arguments,
        rehearse=rehearse,
    ) as run:
        assert await run.drain_and_kill() == ([0], [1])
        drained, _ = await run.plans(2)
        assert drained.how == "live shadow"
        run.let_go("between")
        await run.ends_like(golden, lost=1)


@pytest.mark.thorough
async def test_a_standby_rehearses_a_job_that_evaluates_after_each_step(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """The digest that follows the recorded step comes after an evaluation."""
    arguments = (*LONG, "--evaluate")
    async with running(
        tmp_path, redis.url, faults=[PACE], script=SCRIPT, arguments=arguments, rehearse=True
    ) as run:
        verdicts = [verdict for _, verdict in await run.rehearsed(1)]

    assert verdicts
    assert not any(verdict.refusal or verdict.suspect for verdict in verdicts)


@pytest.mark.thorough
async def test_weights_that_are_clipped_are_copied_in_one_wait(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, redis: EmbeddedRedis
) -> None:
    """An optimizer owns them, so the joiner applies gradients, and has other weights."""
    arguments, golden = arguments_and_golden(tmp_path_factory, "--clip")
    async with running(
        tmp_path, redis.url, faults=[PACE_OF_2], script=SCRIPT, arguments=arguments
    ) as run:
        assert await run.drain_and_kill() == ([0], [1])
        drained, _ = await run.plans(2)
        assert drained.how.startswith("live shadow, training waited for a whole copy")
        run.let_go("between")
        await run.ends_like(golden, lost=1)


async def test_a_hot_standby(job: Job, tmp_path: Path, redis: EmbeddedRedis) -> None:
    arguments, golden = job
    async with running(
        tmp_path,
        redis.url,
        faults=[PACE, NEVER_SENT],
        script=SCRIPT,
        arguments=arguments,
        more_config=HOT,
    ) as run:
        view = await run.shadowed()
        refused = [r for w in workers(view) for r in w.rehearsed if r.refusal or r.suspect]
        (rank,) = [w.shadow.rank for w in workers(view) if w.shadow]
        await run.kill(rank)
        plan = await run.done()
        run.let_go("between")

        assert refused == []
        assert [m.rank for m in plan.moves] == [rank]
        await run.ends_like(golden, lost=1)
