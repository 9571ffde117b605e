"""How long training stands still when a worker is killed whose rank a hot standby follows, and when
nobody follows it, at several model sizes, in turn.

``idle``: what a loss costs besides computing a step twice: until it is known, and from where the
last survivor is done with the step under way to where the last rank begins the next, and in that
for as long as the joiner's vote waits for the comparison of its state. ``beyond one step``: the
same of those losses for which a step was repeated; one that comes after the vote costs nothing
else, which is less than a step.
``downtime``: from the kill to the first commit of a step that had not been committed, on the last
rank, less one median step; it counts the rest of the step under way, and is also split as in
``bench.downtime``. ``set back``: by how much later that commit comes than without the kill, less
the one step that is computed twice. Both also count that fewer processes share the cores for a
while. The killed worker is started again, as a standby, on the same cores while the job recovers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from functools import partial
from typing import Any

from bench.downtime import PATIENCE_S, RANKS, STEP_S, facts, kill
from bench.measure import Report, each
from bench.sizes import Comparison, Facts, Runs, Subject, compare, disturbed
from tmd.core.values.model import Activity, ClusterView, MigrationPlan
from tmd.demo import story
from tmd.demo.cluster import LocalCluster, host_of, workers
from tmd.demo.report import PARTS, DemoEvent, DemoTrace, gap_s
from tmd.demo.story import StoryTimes

FOLLOWED = len(RANKS) - 1
"""The rank that the first hot standby follows."""
WAYS = {"hot": "hot = 1\n", "copy": ""}
ROWS = {
    "idle_s": ("idle", "no survivor has anything to compute"),
    "beyond_step_s": ("beyond one step", "the same where a step is repeated"),
    "set_back_s": ("set back", "beyond the step that is repeated"),
    "downtime_s": ("downtime", "from the kill on, beyond one step"),
    "median_step_s": ("median step", "before the kill"),
}
TARGETS = ("beyond_step_s", "set_back_s", "downtime_s")
LIMIT_S = 0.1


def at_work(view: ClusterView, step: int, *, hot: bool) -> bool:
    """All ranks have come to ``step``, and a standby follows, or waits."""
    training = [w.step for w in workers(view) if w.activity is Activity.TRAINING]
    spare = [w for w in workers(view) if w.rank is None]
    if hot:
        there = any(
            w.activity is Activity.IN_STEP and w.shadow and w.shadow.verified for w in spare
        )
    else:
        there = any(w.activity is Activity.STANDBY and w.rehearsed for w in spare)
    return there and len(training) == len(RANKS) and min(training) >= step


async def run_on(cluster: LocalCluster, steps: int, *, hot: bool) -> ClusterView:
    """Wait until it is at work, and then for ``steps`` more steps."""
    view = await cluster.until(
        lambda v: at_work(v, 1, hot=hot), "all train, the standby is ready", PATIENCE_S
    )
    goal = max(w.step for w in workers(view)) + steps
    return await cluster.until(
        lambda v: at_work(v, goal, hot=hot), f"step {goal}", PATIENCE_S + STEP_S * steps
    )


async def killed(subject: Subject) -> Facts:
    """One run with ``--events`` kills of the worker whose rank is followed."""
    args, hot = subject.args, subject.way == "hot"

    async def disturb(cluster: LocalCluster, told: StoryTimes) -> None:
        for _ in range(args.events):
            view = await run_on(cluster, args.quiet, hot=hot)
            # At no particular point of a step.
            await asyncio.sleep(random.uniform(0, max(w.step_seconds for w in workers(view))))
            host = host_of(view, FOLLOWED)
            assert host is not None
            await story.event(cluster, told, partial(kill, cluster, host))
        await run_on(cluster, args.quiet, hot=hot)

    trace, found = await disturbed(subject, disturb, max_restarts=99)
    return [{**facts(e, plan), **costs(trace, e, plan)} for e, plan in found]


def costs(trace: DemoTrace, event: DemoEvent, plan: MigrationPlan) -> dict[str, float | None]:
    """What a loss costs, by the name of the measure, in seconds."""
    return {
        "beyond_step_s": event.idle_s if event.repeated_steps else None,
        "set_back_s": set_back(trace, event, plan),
    }


def set_back(trace: DemoTrace, event: DemoEvent, plan: MigrationPlan) -> float:
    """Seconds between the last commit before a loss and the first after it, less that step, and
    less the same once more if it was repeated."""
    return gap_s(trace, plan) - (1 + min(event.repeated_steps, 1)) * event.median_step_s


def tell(report: Report, runs: Runs, _: argparse.Namespace) -> dict[str, Any]:
    """Rows and targets; returns the figures."""
    figures: dict[str, Any] = {}
    for name, found in runs.items():
        shown = figures[name] = {key: each(found, key) for key in ROWS}
        for key, (row, remark) in ROWS.items():
            report.row(f"{name}: {row}" if key == "idle_s" else f"  {row}", shown[key], remark)
        for part in PARTS:
            shown[part] = each([e["split"] for e in found], part)
            report.row(f"  {part}", shown[part])
        for key in TARGETS if name.startswith("hot") else ():
            title = f"{name}: {ROWS[key][0]} <= {LIMIT_S} s"
            report.target(title, shown[key].get("median"), LIMIT_S, at_least=False)
    return figures


def main() -> int:
    return compare(Comparison("hot", __doc__, WAYS, "kills", 5, killed, tell))


if __name__ == "__main__":
    raise SystemExit(main())
