"""A worker is killed at every place of a step; the numbers are those of an undisturbed run."""

from pathlib import Path

import pytest

from tests.e2e.harness import EPOCHS, SCRIPT, Golden, live_plan, running
from tests.marks import thorough
from tmd.core.values.model import PlanKind
from tmd.embedded import EmbeddedRedis

CATCHING = str(Path(__file__).parent / "scripts" / "catching_script.py")
PLACES = (
    "data",
    "forward",
    "backward",
    "before-vote",
    "in-vote",
    "after-vote",
    "optimizer",
    "between",
)


# Rank 0 has most special cases; the other rank shows that they are not needed.
@pytest.mark.parametrize("rank", [0, thorough(1)])
@pytest.mark.parametrize("arguments", [(), ("--leave-early",)], ids=["to its end", "left early"])
async def test_kill_9_at_every_place_of_a_step(
    arguments: tuple[str, ...], rank: int, tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """One job loses the same rank again and again, each time at another point of a step.

    Each time a standby takes over, and the restarted worker stands by. At most one step is repeated
    each time, and the final numbers are equal, whether or not survivors leave a broken step early.
    """
    steps = {place: 4 * number for number, place in enumerate(PLACES, start=1)}
    faults = [f"{place}@{rank}:{step}=kill" for place, step in steps.items()]
    async with running(
        tmp_path, redis.url, faults=faults, arguments=arguments, max_restarts=len(PLACES)
    ) as run:
        plans = await run.plans(len(PLACES))

        assert all(run.fired(place) for place in PLACES)
        assert [p.kind for p in plans] == [PlanKind.FAILOVER] * len(PLACES)
        assert all([m.rank for m in p.moves] == [rank] for p in plans)
        assert all(
            p.resume in (step, step + 1) for p, step in zip(plans, steps.values(), strict=True)
        )
        # A worker that dies after a vote has committed, but the trace lacks the step.
        await run.ends_like(golden, unwritten=[(rank, step) for step in steps.values()])


@pytest.mark.parametrize(
    ("point", "arguments"), [("backward", ()), thorough("forward", ("--leave-early",))]
)
async def test_a_loss_in_the_very_first_step(
    point: str, arguments: tuple[str, ...], tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """The joiner has run backward passes, and survivors have run one or none."""
    async with running(
        tmp_path, redis.url, faults=[f"{point}@1:0=kill"], arguments=arguments
    ) as run:
        plan = await run.done()

        assert run.fired(point)
        assert plan.resume == 0
        await run.ends_like(golden, lost=1)


async def test_a_loss_before_the_very_first_step(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """Survivors have run no backward pass, after which DDP would change its buckets."""
    gates = [f"{rank} loop@{rank}:0=wait" for rank in range(3)]
    async with running(tmp_path, redis.url, faults=[*gates, "dies data@1:0=kill"]) as run:
        plan = await run.lost_before_a_step("1", "0", "2")

        assert run.fired("dies")
        assert plan.resume == 0
        await run.ends_like(golden, lost=1)


@pytest.mark.parametrize("fault", [thorough("in-vote@0:10"), "backward@1:11"])
async def test_a_loss_between_two_epochs(
    fault: str, tmp_path: Path, redis: EmbeddedRedis, epochs_golden: Golden
) -> None:
    """In the vote that ends an epoch (it counts as step 10), and in the following step."""
    point = fault.partition("@")[0]
    async with running(tmp_path, redis.url, faults=[f"{fault}=kill"], arguments=EPOCHS) as run:
        plan = await run.done("trainer")

        assert run.fired(point)
        assert plan.resume in (10, 11)
        await run.ends_like(epochs_golden, lost=1)


@pytest.mark.thorough
async def test_a_rank_whose_groups_have_no_counterpart_is_refused(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """Groups of two and of one: reported once, instead of hopeless recoveries."""
    async with running(
        tmp_path, redis.url, faults=["backward@0:9=kill"], arguments=["--halves"]
    ) as run:
        view = await run.cluster.until(
            lambda v: "no standby" in (v.jobs[0].detail if v.jobs else ""), "the job holds"
        )
        plan = live_plan(view)

        assert plan is not None
        assert "rank 0 has the process groups" in run.cluster.log("s1")
        assert "rank 0 has the process groups" in plan.outcome


@pytest.mark.parametrize(
    ("script", "point"),
    [
        thorough(SCRIPT, "forward"),
        thorough(CATCHING, "forward"),
        (CATCHING, "data"),
    ],
    ids=["uncaught", "caught in a step", "caught in the loader"],
)
async def test_an_error_in_user_code_is_a_loss(
    script: str, point: str, tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """It ends the process with status 1, even if the script catches it and waits for the others.
    The rank is replaced as any other."""
    fault = f"{point}@2:9=raise"
    async with running(tmp_path, redis.url, faults=[fault], script=script) as run:
        plan = await run.done("trainer.exited")

        assert run.fired(point)
        assert [move.rank for move in plan.moves] == [2]
        await run.ends_like(golden, lost=1)
        # The plan may precede the status: it starts once the process is known to be ending.
        assert "ended with status 1" in run.cluster.log("h3")


async def test_a_killed_worker_is_replaced_while_the_kernel_still_has_it(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """A process of many gigabytes keeps its links open for long after it was killed; no rank waits
    for that. Without the futex its end would go unnoticed for half a minute."""
    async with running(tmp_path, redis.url, faults=["backward@1:9=linger"]) as run:
        plan = await run.done("trainer.exited")

        assert run.fired("backward")
        assert plan.reason.endswith("its process is ending")
        await run.ends_like(golden, lost=1)


async def test_a_stopped_worker_is_ended_and_replaced(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """SIGSTOP: the heartbeat stops, the launcher kills the process, its rank is replaced."""
    faults = ["backward@1:9=stop"]
    async with running(tmp_path, redis.url, faults=faults, silence_s=1.0) as run:
        plan = await run.done()

        assert run.fired("backward")
        assert plan.cause == "trainer.stalled"
        await run.ends_like(golden, lost=1)


@pytest.mark.thorough
async def test_two_workers_at_once(tmp_path: Path, redis: EmbeddedRedis, golden: Golden) -> None:
    """Two of three ranks die in the same step; two standbys copy the one replica left."""
    faults = ["forward@0:6=kill", "backward@2:6=kill"]
    async with running(tmp_path, redis.url, faults=faults, standby=("s1", "s2")) as run:
        await run.done()

        assert run.fired("forward")
        assert run.fired("backward")
        await run.ends_like(golden, lost=2)


async def test_a_second_loss_during_the_recovery(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """A survivor dies while it waits for the others; the plan is rewritten with both."""
    faults = ["forward@0:6=kill", "synced@2:*=kill"]
    async with running(tmp_path, redis.url, faults=faults, standby=("s1", "s2")) as run:
        plan = await run.done()

        assert run.fired("forward")
        assert run.fired("synced")
        assert {m.rank for m in plan.moves} <= {0, 2}
        await run.ends_like(golden, lost=2)


@pytest.mark.thorough
async def test_the_source_dies_while_it_sends(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """The state is copied from the next replica."""
    faults = ["forward@0:6=kill", "sending@*:*=kill"]
    async with running(tmp_path, redis.url, faults=faults, standby=("s1", "s2")) as run:
        await run.done()

        assert run.fired("sending")
        await run.ends_like(golden, lost=2)


@pytest.mark.parametrize("point", ["sending", thorough("sent")])
async def test_the_link_breaks_while_the_state_is_sent(
    point: str, tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """Both workers are well: the state is sent again, or the joiner has it and cannot say so.
    Nobody else is lost."""
    faults = ["forward@0:6=kill", f"{point}@*:*=cut"]
    async with running(tmp_path, redis.url, faults=faults) as run:
        plan = await run.done()

        assert run.fired(point)
        assert (len(plan.dead), plan.rejected, plan.late) == (1, (), ())
        await run.ends_like(golden, lost=1)


async def test_the_joiner_dies_while_it_receives(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """The next standby takes the rank."""
    faults = ["forward@0:6=kill", "receiving@*:*=kill"]
    async with running(tmp_path, redis.url, faults=faults, standby=("s1", "s2")) as run:
        plan = await run.done()

        assert run.fired("receiving")
        assert len({*plan.dead, *plan.rejected}) == 2
        await run.ends_like(golden, lost=2)


async def test_no_standby_holds_until_one_appears(
    tmp_path: Path, redis: EmbeddedRedis, golden: Golden
) -> None:
    """The launcher's restart of the worker is the standby that appears."""
    faults = ["forward@1:8=kill"]
    async with running(tmp_path, redis.url, faults=faults, standby=(), max_restarts=1) as run:
        plan = await run.done()

        assert plan.moves[0].joiner is not None
        assert plan.moves[0].joiner.host == plan.moves[0].leaver.host
        await run.ends_like(golden)


@pytest.mark.thorough
async def test_a_whole_host_at_once(tmp_path: Path, redis: EmbeddedRedis, golden: Golden) -> None:
    """Daemon, launcher and worker of a host die together: no process is left to report it."""
    async with running(tmp_path, redis.url, faults=["forward@1:9=wait"]) as run:
        await run.at_gate()
        await run.cluster.lose("h2")
        plan = await run.done()

        assert plan.cause == "host.silent"
        assert [m.rank for m in plan.moves] == [1]
        await run.ends_like(golden, lost=1)
