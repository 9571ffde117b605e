"""One rank of a real job becomes slow: it alone is named, and without a reason nobody moves it."""

from pathlib import Path

from tests.e2e.harness import history, live_plan, running
from tmd.core.model import Alert, ClusterView
from tmd.demo.cluster import workers
from tmd.embedded import EmbeddedRedis

CONFIG = """
[detectors.straggler]
strategy = "act"
[policies]
enabled = ["replace_failed", "rebalance_stragglers"]
[policies.rebalance_stragglers]
cost_s = 0.1
"""
SLOW_FROM = 300


def slow(view: ClusterView) -> list[Alert]:
    return [a for h in view.hosts for a in h.alerts if a.code == "straggler.slow"]


async def test_the_slow_rank_alone_is_named_and_without_evidence_stays(
    tmp_path: Path, redis: EmbeddedRedis
) -> None:
    """However dear it has become: nothing says that its host is to blame."""
    async with running(
        tmp_path,
        redis.url,
        faults=[f"forward@2:{SLOW_FROM}=pace"],
        more_config=CONFIG,
        arguments=("--steps", "20000"),
    ) as run:
        view = await run.cluster.until(lambda v: bool(slow(v)), "a slow rank is named")
        (alert,) = slow(view)
        (culprit,) = [w for w in workers(view) if w.rank == 2]
        later = await run.cluster.until(
            lambda v: any(w.pace and w.pace.lost_s > 3 for w in workers(v)), "it has become dear"
        )

        assert alert.entity == culprit.worker
        assert culprit.pace is not None
        assert culprit.pace.slow_since is not None
        assert SLOW_FROM < culprit.pace.slow_since <= SLOW_FROM + 60
        assert [a.entity for a in slow(later)] == [culprit.worker]
        assert (live_plan(later), history(later)) == (None, ())
