"""A joiner that gets no outputs follows the gradients of its rank, and takes it over."""

import os
import signal
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import golden_of
from tests.e2e.harness import (
    EPOCHS,
    LONG,
    NEVER_SENT,
    PACE,
    Golden,
    Run,
    history,
    live_plan,
    make_golden,
    running,
)
from tests.e2e.test_shadow import SICK
from tests.marks import thorough
from tmd.core.values.model import Activity, MigrationPlan, Phase, PlanKind
from tmd.demo.cluster import workers
from tmd.embedded import EmbeddedRedis

GRADIENTS = '[shadow]\nmirror = "gradients"\n'
FOLLOWED = 'live shadow, by gradients only, since [shadow] mirror = "gradients"'


def following(
    folder: Path,
    redis: EmbeddedRedis,
    fault: str = NEVER_SENT,
    arguments: Sequence[str] = LONG,
    **more: Any,
) -> AbstractAsyncContextManager[Run]:
    """A run of the long job, whose moves mirror only gradients unless ``more_config`` is given."""
    more.setdefault("more_config", GRADIENTS)
    return running(folder, redis.url, faults=[PACE, fault], arguments=arguments, **more)


async def standby_waits(run: Run) -> None:
    """The job trains, and continues slowly."""
    await run.reached("between")
    await run.cluster.until(
        lambda v: any(w.activity is Activity.STANDBY for w in workers(v)), "a standby waits"
    )


async def moved(run: Run) -> MigrationPlan:
    """Drain the host of rank 1 once a standby waits, and return how its rank has moved."""
    await standby_waits(run)
    await run.cluster.drain("h2")
    plan = await run.done("drain")
    run.let_go("between")
    return plan


@pytest.mark.parametrize("arguments", [LONG, thorough(EPOCHS)], ids=["one call", "several calls"])
async def test_a_rank_moves_by_its_gradients(
    arguments: tuple[str, ...], tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """Nothing but the last step's gradients is sent at the switch."""
    (tmp_path / "golden").mkdir()
    golden = await make_golden(tmp_path / "golden", arguments)
    async with following(tmp_path / "run", redis, arguments=arguments) as run:
        plan = await moved(run)

        assert plan.kind is PlanKind.PLANNED
        assert plan.how == FOLLOWED
        assert plan.timings["copy_bytes"] == 0
        await run.ends_like(golden)


@pytest.mark.thorough
async def test_outputs_that_do_not_fit_are_given_up_for_gradients(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """A single output exceeds the memory of the source: the joiner comes back in the same plan."""
    many = (*LONG, "--outputs", "2000000")
    (tmp_path / "golden").mkdir()
    golden = await make_golden(tmp_path / "golden", many)
    small = "[shadow]\nstaging_mb = 4\nrehearse = false\n"
    async with following(tmp_path / "run", redis, arguments=many, more_config=small) as run:
        plan = await moved(run)

        assert plan.how == (
            "live shadow, by gradients only, since its outputs have exceeded the link"
        )
        assert [p.phase for p in history(await run.cluster.view())] == [Phase.DONE]
        await run.ends_like(golden)


@pytest.mark.thorough
@pytest.mark.usefixtures("compiler")
async def test_a_sharded_rank_moves_by_its_gradients(
    tmp_path: Path, redis: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each rank follows its own part."""
    sharded = (*LONG, "--sharded")
    golden = golden_of(tmp_path_factory.mktemp("sharded_golden"), sharded)
    async with following(tmp_path, redis, arguments=sharded) as run:
        plan = await moved(run)

        assert plan.how == FOLLOWED
        await run.ends_like(golden)


@pytest.mark.thorough
async def test_gradients_of_a_replica_serve_for_a_sick_rank(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """The leaver compares the state, and sends its rank-local statistics."""
    async with following(tmp_path, redis, own_config={"h2": SICK}) as run:
        await run.cluster.until(
            lambda v: any(h.alerts for h in v.hosts if h.host == "h2"), "h2 is found sick"
        )
        plan = await moved(run)

        assert plan.how.startswith("live shadow of rank 2, by gradients only")
        await run.ends_like(long_golden)


@pytest.mark.thorough
async def test_gradients_that_lead_elsewhere_end_in_a_copy(
    tmp_path: Path, redis: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The optimizer draws noise, which no gradient shows."""
    noisy = (*LONG, "--noisy")
    golden = golden_of(tmp_path_factory.mktemp("noisy_golden"), noisy)
    async with running(
        tmp_path, redis.url, faults=[PACE], arguments=noisy, more_config=GRADIENTS
    ) as run:
        plan = await moved(run)

        assert plan.how.startswith("stop-and-copy: by gradients only")
        assert "they lead to another state" in plan.how
        assert plan.timings["copy_bytes"] > 0
        await run.ends_like(golden)


@pytest.mark.thorough
async def test_a_leaver_that_dies_after_the_vote_is_replaced_from_a_replica(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """The joiner has followed the last gradients, and nobody has compared what it has."""
    async with following(tmp_path, redis, "taking@*:*=wait") as run:
        await standby_waits(run)
        await run.cluster.drain("h2")
        await run.reached("taking")
        leaver = next(
            w
            for w in workers(await run.cluster.view())
            if w.worker.startswith("h2/") and w.activity is Activity.LEFT
        )
        os.kill(leaver.pid, signal.SIGKILL)
        await run.cluster.until(
            lambda v: (p := live_plan(v)) is not None and p.kind is PlanKind.FAILOVER, "a failover"
        )
        run.let_go("taking")
        plan = await run.done("leaver")
        run.let_go("between")

        assert plan.kind is PlanKind.FAILOVER
        await run.ends_like(long_golden, lost=1)
