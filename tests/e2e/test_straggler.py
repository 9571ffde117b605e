"""One rank of a real job becomes slow: it alone is reported, and moved if its host is to blame."""

from pathlib import Path

from tests.e2e.harness import Run, history, live_plan, running
from tests.plugins.nvml.driver import Script
from tmd.core.values.model import Alert, ClusterView, MigrationPlan, PlanKind
from tmd.demo.cluster import host_of, workers
from tmd.embedded import EmbeddedRedis

CONFIG = """
[detectors.straggler]
strategy = "act"
[policies]
enabled = ["replace_failed", "rebalance_stragglers"]
[policies.rebalance_stragglers]
cost_s = 0.1
"""
GPUS = """
[detectors.nvml]
strategy = "advise"
interval_s = 0.2
sysfs = "{folder}"
"""
STEADY = ("--steps", "20000", "--work", "0.02")
"""Work in each step that is long compared with the machine's other load."""
HEAT = 0x40
SLOW_FROM = 150


async def test_only_the_slow_rank_is_reported_and_moved_once_its_host_is_to_blame(
    tmp_path: Path, redis: EmbeddedRedis, script: Script
) -> None:
    """Without evidence against its host it stays, at any cost; a GPU of its host that the hardware
    slows down is such evidence."""
    async with running(
        tmp_path,
        redis.url,
        faults=[f"forward@2:{SLOW_FROM}=pace"],
        more_config=CONFIG,
        own_config={"h3": GPUS.format(folder=tmp_path)},
        arguments=STEADY,
    ) as run:
        await named_and_left_alone(run)
        script.put({"0.reasons": HEAT})
        plan = await moved(run)
        view = await run.cluster.until(lambda v: not slow(v), "nobody is slow any more")

        (move,) = plan.moves
        assert (move.rank, move.leaver.host) == (2, "h3")
        assert move.joiner is not None
        assert move.joiner.host == "s1"
        assert (plan.kind, plan.policy) == (PlanKind.PLANNED, "rebalance_stragglers")
        assert "nvml.slowed of pci:0000:3b:00.0 on its host" in plan.reason
        assert [p.id for p in history(view)] == [plan.id]


async def named_and_left_alone(run: Run) -> None:
    view = await run.cluster.until(lambda v: bool(slow(v)), "a slow rank is named")
    (alert,) = slow(view)
    (culprit,) = [w for w in workers(view) if w.rank == 2]
    later = await run.cluster.until(
        lambda v: any(w.pace and w.pace.lost_s > 3 for w in workers(v)), "it has become dear"
    )

    assert run.fired("forward")
    assert alert.entity == culprit.worker
    assert culprit.pace is not None
    assert culprit.pace.slow_since is not None
    assert SLOW_FROM < culprit.pace.slow_since <= SLOW_FROM + 60
    assert [a.entity for a in slow(later)] == [culprit.worker]
    assert (live_plan(later), history(later)) == (None, ())


async def moved(run: Run) -> MigrationPlan:
    """The plan, once it is carried out and the rank trains elsewhere."""
    plan = await run.done("straggler.slow")
    await run.cluster.until(
        lambda v: (h := host_of(v, 2)) is not None and h.host == "s1", "rank 2 trains on s1"
    )
    return plan


def slow(view: ClusterView) -> list[Alert]:
    return [a for h in view.hosts for a in h.alerts if a.code == "straggler.slow"]
