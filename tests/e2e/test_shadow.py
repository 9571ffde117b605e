"""A joiner shadows its rank before it takes over, and dies at every point of the shadow."""

import os
import signal
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.harness import (
    EPOCHS,
    LONG,
    PACE,
    RANKS,
    Golden,
    Run,
    history,
    live_plan,
    make_golden,
    running,
)
from tests.marks import thorough
from tmd.core.values.model import Activity, MigrationPlan, Phase, PlanKind
from tmd.demo.cluster import ready, workers
from tmd.embedded import EmbeddedRedis
from tmd.testing.clients import until

GATE = "data@0:5=wait"
"""Rank 0 waits here, and so do all ranks, until a drain was requested."""
NEVER_COPIED = "receiving@*:*=kill"
"""A joiner that receives a state by stop-and-copy dies."""
SICK = """
[[detectors.exec.checks]]
name = "sick"
command = ["sh", "-c", "echo '{\\"message\\": \\"sick\\"}'; exit 1"]
"""
"""An operator's check that finds its host degraded."""
SLOW_COPY = "[shadow]\ncopy_mb_s = 0.2\n"
"""Rate at which the small model's state takes several steps to copy."""


def started(
    folder: Path,
    redis: EmbeddedRedis,
    *,
    faults: Sequence[str],
    standby: Sequence[str] = ("s1",),
    arguments: Sequence[str] = (),
    more_config: str = "",
    own_config: dict[str, str] | None = None,
) -> AbstractAsyncContextManager[Run]:
    """A run of the long job, which lasts until the test's condition was observed."""
    return running(
        folder,
        redis.url,
        faults=(*faults, PACE),
        standby=standby,
        arguments=(*LONG, *arguments),
        more_config=more_config,
        own_config=own_config,
    )


async def drained(run: Run, standbys: int = 1) -> None:
    """Request the drain of rank 1's host while the job waits, then let it run."""
    await run.reached("data")
    await run.cluster.until(
        lambda v: sum(w.activity is Activity.STANDBY for w in workers(v)) == standbys,
        "the standbys wait",
    )
    await run.cluster.drain("h2")
    await run.in_phase(Phase.PREPARE)
    run.let_go("data")


async def test_the_joiner_takes_over_without_a_copy_at_the_switch(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """Its digest equalled the leaver's after a step of its own; no stayer opened more links than
    the new neighbour needs; no rank repeated a step."""
    async with started(tmp_path, redis, faults=[GATE, NEVER_COPIED]) as run:
        await drained(run)
        view = await run.cluster.until(
            lambda v: any(w.shadow and w.shadow.verified for w in workers(v)), "a digest is equal"
        )
        shadow = next(w.shadow for w in workers(view) if w.shadow)
        plan = await run.done("drain")

        assert shadow.rank == 1
        assert shadow.copied == 1
        assert shadow.note == ""
        assert plan.kind is PlanKind.PLANNED
        assert "lag" in plan.timings
        assert not run.fired("receiving")
        await run.ends_like(long_golden)


@pytest.mark.parametrize("point", [thorough("copying"), thorough("tail"), "shadowing"])
async def test_a_joiner_that_dies_is_replaced_by_the_next(
    point: str, tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """Training is not affected; the plan is dropped and the next standby shadows."""
    faults = [GATE, NEVER_COPIED, f"{point}@*:*=kill"]
    async with started(
        tmp_path, redis, faults=faults, standby=("s1", "s2"), more_config=SLOW_COPY
    ) as run:
        await drained(run, standbys=2)
        plan = await run.done("drain")

        first = history(await run.cluster.view())[0]
        assert run.fired(point)
        assert first.phase is Phase.ABORTED
        assert first.moves[0].joiner != plan.moves[0].joiner
        await run.ends_like(long_golden, lost=1)


async def test_a_joiner_that_dies_once_it_has_the_vote_gives_the_rank_back(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """The leaver still holds its state."""
    async with started(tmp_path, redis, faults=[GATE, "taking@*:*=kill"]) as run:
        await drained(run)
        plan = await run.done("trainer")

        assert run.fired("taking")
        assert plan.kind is PlanKind.FAILOVER
        assert plan.moves[0].joiner is not None
        assert plan.moves[0].joiner.host == "h2"
        await run.ends_like(long_golden, lost=1)


async def test_a_leaver_that_dies_after_the_vote_halts_those_that_have_not_switched_yet(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """They hear of the loss between the vote and the switch, and the joiner has the vote."""
    waits = [f"{name} switching@{rank}:*=wait" for name, rank in (("first", 0), ("last", 2))]
    faults = [GATE, *waits, "switching@1:*=kill"]
    async with started(tmp_path, redis, faults=faults, standby=("s1", "s2")) as run:
        await drained(run, standbys=2)
        logs = partial(map, run.cluster.log, ("h1", "h3"))
        await until(lambda: all('"directive": "Hold"' in log for log in logs()), within_s=30.0)
        run.let_go("first")
        run.let_go("last")
        plan = await run.done("trainer")

        assert [m.rank for m in plan.moves] == [1]
        await run.ends_like(long_golden, lost=1, unwritten=_written_late(plan))


@pytest.mark.parametrize("point", [thorough("showing"), "mirroring"])
async def test_a_leaver_that_dies_while_it_is_shadowed_is_a_failover(
    point: str, tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """While its state is copied, and while its outputs are mirrored."""
    async with started(
        tmp_path, redis, faults=[GATE, f"{point}@1:*=kill"], more_config=SLOW_COPY
    ) as run:
        await drained(run)
        plan = await run.done("trainer")

        assert run.fired(point)
        assert [m.rank for m in plan.moves] == [1]
        await run.ends_like(long_golden, lost=1, unwritten=_written_late(plan))


@pytest.mark.thorough
async def test_a_stayer_dies_while_another_rank_is_shadowed(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """The planned move is dropped for the failover, which uses its joiner."""
    async with started(tmp_path, redis, faults=[GATE, "shadowing@*:*=wait"]) as run:
        await drained(run)
        await run.reached("shadowing")
        await run.kill(2)
        await run.cluster.until(
            lambda v: v.jobs[0].plan is not None and v.jobs[0].plan.kind is PlanKind.FAILOVER,
            "the loss is known",
        )
        run.let_go("shadowing")
        plan = await run.done("trainer")

        assert [m.rank for m in plan.moves] == [2]
        assert history(await run.cluster.view())[0].phase is Phase.ABORTED
        await run.ends_like(long_golden, lost=1)


async def test_a_joiner_with_one_flipped_bit_is_refused(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """It does not compute the bits of the job: the next standby is tried."""
    faults = [GATE, NEVER_COPIED, "shadowing@*:*=flips"]
    async with started(tmp_path, redis, faults=faults, standby=("s1", "s2")) as run:
        await drained(run, standbys=2)
        plan = await run.done("drain")

        first = history(await run.cluster.view())[0]
        assert run.fired("shadowing")
        assert "computes other bits than rank 1" in first.outcome
        assert first.moves[0].joiner != plan.moves[0].joiner
        await run.ends_like(long_golden)


async def test_a_refused_or_drained_standby_gets_no_rank_after_a_loss(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """A standby computes other bits in a move, another one takes the rank. Then a worker is killed:
    the job holds with a reason for each standby, until the drain is withdrawn."""
    faults = [GATE, "shadowing@*:*=flips"]
    async with started(tmp_path, redis, faults=faults, standby=("s1", "s2")) as run:
        await drained(run, standbys=2)
        moved = await run.done("drain")
        await run.cluster.until(lambda v: ready(v, len(RANKS), 2), "both stand by")
        await run.kill(2)
        held = await run.cluster.until(
            lambda v: v.jobs[0].detail.startswith("no standby for rank 2: "), "the job holds"
        )
        await run.cluster.undrain("h2")
        plan = await run.done("trainer.exited")

        refused = history(held)[0].moves[0].joiner
        assert refused is not None
        assert moved.moves[0].joiner != refused
        detail = held.jobs[0].detail
        assert f"not {refused.worker}: it failed its rehearsal: this worker computes" in detail
        assert "its host is drained ('tmd undrain h2' gives it back)" in detail
        assert [m.joiner.host for m in plan.moves if m.joiner] == ["h2"]
        await run.ends_like(long_golden, lost=1)


async def test_a_joiner_that_computes_other_gradients_is_refused(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """Its state equals the rank's, since it gets mirrored sums, but its own gradients differ."""
    async with started(
        tmp_path,
        redis,
        faults=[GATE, NEVER_COPIED],
        standby=("s1", "s2"),
        arguments=["--blind-host", "s1"],
    ) as run:
        await drained(run, standbys=2)
        plan = await run.done("drain")

        first = history(await run.cluster.view())[0]
        assert "computes other bits than rank 1" in first.outcome
        assert "inputs of" in first.outcome
        assert plan.moves[0].joiner is not None
        assert plan.moves[0].joiner.host == "s2"
        await run.ends_like(long_golden)


@pytest.mark.thorough
async def test_a_joiner_that_cannot_keep_up_is_dropped(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """Training does not wait for it; the next standby is tried."""
    async with started(
        tmp_path,
        redis,
        faults=[GATE, NEVER_COPIED],
        standby=("s1", "s2"),
        arguments=["--slow-host", "s1"],
        more_config="[shadow]\npatience_s = 0.4\n",
    ) as run:
        await drained(run, standbys=2)
        plan = await run.done("drain")

        for dropped in history(await run.cluster.view())[:-1]:
            assert dropped.phase is Phase.ABORTED
            assert "not in step with rank 1 in time" in dropped.outcome
        assert plan.moves[0].joiner is not None
        assert plan.moves[0].joiner.host == "s2"
        await run.ends_like(long_golden)


@pytest.mark.thorough
async def test_a_link_to_the_shadow_that_is_cut_ends_in_stop_and_copy(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """The fallback, with the reason for it."""
    async with started(tmp_path, redis, faults=[GATE, "shadowing@*:*=cuts"]) as run:
        await drained(run)
        plan = await run.done("drain")

        assert run.fired("shadowing")
        assert plan.timings["copy_bytes"] > 0
        assert "the shadow was ended" in run.cluster.log("s1")
        await run.ends_like(long_golden)


@pytest.mark.thorough
async def test_a_link_to_the_shadow_that_is_cut_once_is_opened_again(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """The joiner starts again over another link; no rank waits for a copy."""
    faults = [GATE, NEVER_COPIED, "shadowing@*:*=cut"]
    async with started(tmp_path, redis, faults=faults) as run:
        await drained(run)
        plan = await run.done("drain")

        assert run.fired("shadowing")
        assert "shadowing again" in run.cluster.log("s1")
        assert plan.how == "live shadow"
        await run.ends_like(long_golden)


@pytest.mark.thorough
async def test_a_joiner_that_dies_while_the_others_arm(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """One of them has not armed yet, so none can have switched: the plan is dropped."""
    faults = [GATE, NEVER_COPIED, "arming@2:*=wait"]
    async with started(tmp_path, redis, faults=faults, standby=("s1", "s2")) as run:
        await drained(run, standbys=2)
        await run.reached("arming")
        view = await run.in_phase(Phase.READY)
        joiner = next(w for w in workers(view) if w.activity is Activity.IN_STEP)
        os.kill(joiner.pid, signal.SIGKILL)
        run.let_go("arming")
        plan = await run.done("drain")

        first = history(await run.cluster.view())[0]
        assert first.phase is Phase.ABORTED
        assert first.moves[0].joiner is not None
        assert first.moves[0].joiner.worker == joiner.worker
        assert first.moves[0].joiner != plan.moves[0].joiner
        await run.ends_like(long_golden, lost=1)


async def test_a_state_that_grows_is_not_moved(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """Its rank stays, training continues, and the plan names the unregistered state."""
    async with started(tmp_path, redis, faults=[GATE], arguments=["--grow-step", "3"]) as run:
        await drained(run)
        first = (await run.plans(1))[0]

        assert first.phase is Phase.ABORTED
        assert "parameters that did not exist when its state was registered" in first.outcome
        await run.ends_like(long_golden)


async def test_a_rank_of_a_degraded_host_is_copied_from_a_replica(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """The joiner shadows another rank; the leaver only confirms that the state is equal, and sends
    its rank-local statistics."""
    faults = [GATE, NEVER_COPIED]
    async with started(tmp_path, redis, faults=faults, own_config={"h2": SICK}) as run:
        await run.cluster.until(
            lambda v: any(h.alerts for h in v.hosts if h.host == "h2"), "h2 is found sick"
        )
        await drained(run)
        plan = await run.done("drain")

        assert [m.rank for m in plan.moves] == [1]
        assert plan.how == "live shadow of rank 2"
        await run.ends_like(long_golden)


@pytest.mark.thorough
async def test_messages_that_a_rank_receives_are_mirrored(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """A message from a named sender is an output like that of any collective."""
    golden_folder = tmp_path / "golden"
    golden_folder.mkdir()
    named = ("--messages", "named")
    golden = await make_golden(golden_folder, (*LONG, *named))
    faults = [GATE, NEVER_COPIED]
    async with started(tmp_path / "run", redis, faults=faults, arguments=named) as run:
        await drained(run)
        plan = await run.done("drain")

        assert plan.how == "live shadow"
        await run.ends_like(golden)


@pytest.mark.thorough
async def test_a_rank_that_receives_from_any_rank_is_copied_not_mirrored(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """A shadow could not assign the message to one of its receives."""
    golden_folder = tmp_path / "golden"
    golden_folder.mkdir()
    anybody = ("--messages", "any")
    golden = await make_golden(golden_folder, (*LONG, *anybody))
    async with started(tmp_path / "run", redis, faults=[GATE], arguments=anybody) as run:
        await drained(run)
        plan = await run.done("drain")

        assert plan.how.startswith("stop-and-copy: messages from any rank cannot be mirrored")
        assert plan.timings["copy_bytes"] > 0
        await run.ends_like(golden)


@pytest.mark.thorough
async def test_an_optimizer_that_no_tail_can_follow_is_copied_in_one_wait(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """It draws random numbers: a shadow can compute its steps, but a tail cannot repeat them."""
    golden_folder = tmp_path / "golden"
    golden_folder.mkdir()
    long_golden = await make_golden(golden_folder, (*LONG, "--noisy"))
    async with started(
        tmp_path / "run",
        redis,
        faults=[GATE, NEVER_COPIED],
        arguments=["--noisy"],
        more_config=SLOW_COPY,
    ) as run:
        await drained(run)
        plan = await run.done("drain")

        assert plan.kind is PlanKind.PLANNED
        assert "training waited for a whole copy" in run.cluster.log("s1")
        await run.ends_like(long_golden)


@pytest.mark.thorough
async def test_a_shadow_waits_for_a_step_of_many_times_the_usual_length(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """Its rank and all others need that long as well."""
    async with started(
        tmp_path,
        redis,
        faults=[GATE, NEVER_COPIED],
        arguments=["--long-step", "8"],
        more_config=SLOW_COPY,
    ) as run:
        await drained(run)
        await run.done("drain")

        assert live_plan(await run.cluster.view()) is None
        await run.ends_like(long_golden)


@pytest.mark.thorough
async def test_two_hosts_drained_at_once_move_one_after_the_other(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """One plan at a time; each rank is shadowed by a separate standby."""
    async with started(tmp_path, redis, faults=[GATE, NEVER_COPIED], standby=("s1", "s2")) as run:
        await run.reached("data")
        await run.cluster.drain("h3")
        await drained(run, standbys=2)
        plans = await run.plans(2)

        assert [p.phase for p in plans] == [Phase.DONE, Phase.DONE]
        assert sorted(p.moves[0].leaver.host for p in plans) == ["h2", "h3"]
        await run.ends_like(long_golden)


@pytest.mark.thorough
async def test_a_host_drained_while_its_worker_shadows_a_rank(
    tmp_path: Path, redis: EmbeddedRedis, long_golden: Golden
) -> None:
    """The move succeeds, and then the rank moves again, to the remaining standby."""
    faults = [GATE, "shadowing@*:*=wait", NEVER_COPIED]
    async with started(tmp_path, redis, faults=faults, standby=("s1", "s2")) as run:
        await drained(run, standbys=2)
        await run.reached("shadowing")
        view = await run.in_phase(Phase.PREPARE)
        plan = live_plan(view)
        assert plan is not None
        joiner = plan.moves[0].joiner
        assert joiner is not None
        await run.cluster.drain(joiner.host)
        run.let_go("shadowing")
        first, second = await run.plans(2)

        assert first.phase is Phase.DONE
        assert second.phase is Phase.DONE
        assert second.moves[0].leaver.host == joiner.host
        await run.ends_like(long_golden)


async def test_a_joiner_shadows_a_rank_across_epochs(
    tmp_path: Path, redis: EmbeddedRedis, epochs_golden: Golden
) -> None:
    """Its script passes the ends of earlier epochs, and shadows later ones."""
    faults = ["data@0:12=wait", NEVER_COPIED, PACE]
    async with running(
        tmp_path, redis.url, faults=faults, arguments=EPOCHS, more_config=SLOW_COPY
    ) as run:
        await drained(run)
        plan = await run.done("drain")

        assert plan.how == "live shadow"
        await run.ends_like(epochs_golden)


def _written_late(plan: MigrationPlan) -> list[tuple[int, int]]:
    """The step that the dead rank may have committed without a trace."""
    return [] if plan.resume is None else [(1, plan.resume - 1)]
