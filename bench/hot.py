"""What it costs when a worker is killed, in three ways and at several model sizes, in turn.

``hot``: a hot standby follows the rank, and the broken step is finished. ``repeat``: one follows
it, and the broken step is repeated. ``copy``: none follows it, and a standby copies the state.

Kills are spread evenly over a step, as far as a benchmark can aim.

``set back``: how much later than without the kill the first new commit comes, on the slowest rank.
A repeated step counts in full. Each host has its own share of the cores (``bench.shares``), so that
the survivors do not compute faster. This needs root.
``idle``: what a loss costs besides computing a step twice. It is the sum of the time until the loss
is known, the time from when the last survivor is done with the current step to when the last rank
begins the next one, and the time for which the joiner's vote in that step waits for the comparison
of its state. Only for losses that repeat a step: one after the vote repeats none.
``downtime``: from the kill to the first commit of a step that had not been committed, on the
slowest rank, less one median step. It includes the rest of the current step, and is also split as
in ``bench.downtime``. The killed worker is started again, as a standby, on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
from functools import partial
from typing import Any

from bench.downtime import PATIENCE_S, RANKS, STANDBY, STEP_S, facts, kill
from bench.measure import Facts, Report, each, pairs, summary
from bench.shares import CoreShares, unable
from bench.sizes import Comparison, Runs, Subject, compare, disturbed
from tmd.campaign.waiting import until
from tmd.core.values.model import Activity, ClusterView, MigrationPlan
from tmd.demo import story
from tmd.demo.cluster import LocalCluster, host_of, workers
from tmd.demo.report import PARTS, DemoEvent, DemoTrace, gap_s
from tmd.demo.story import StoryTimes

FOLLOWED = len(RANKS) - 2
"""The rank that the first hot standby follows: not the last, which its script got when it began."""
WAYS = {"hot": "hot = 1\n", "repeat": "hot = 1\nfinish_steps = false\n", "copy": ""}
"""Lines of the configuration, by the way in which a loss is handled."""
ROWS = {
    "set_back_s": ("set back", "the first new commit is later by"),
    "set_back_steps": ("  in steps", "the same, in median steps"),
    "repeated_steps": ("  repeated", "steps for a loss"),
    "beyond_step_s": ("idle", "no survivor can compute; only losses that repeat a step"),
    "downtime_s": ("downtime", "from the kill on, beyond one step"),
    "median_step_s": ("median step", "before the kill"),
}
LIMITS = {"10M": ("set_back_s", 0.15, "s")}
"""By model size: a measure, the limit of its median, and its unit."""
LIMIT = ("set_back_steps", 0.1, "steps")
"""The same for all other sizes."""
RESTART_S = 5.0
"""Seconds after which a killed worker is started again: the job should have recovered by then."""


def at_work(view: ClusterView, step: int, *, hot: bool) -> bool:
    """Whether all ranks have reached ``step``, and a standby follows a rank (``hot``) or waits."""
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
    """Wait until the job is at work, and then for ``steps`` more steps."""
    view = await cluster.until(
        lambda v: at_work(v, 1, hot=hot), "all train, the standby is ready", PATIENCE_S
    )
    goal = max(w.step for w in workers(view)) + steps
    return await cluster.until(
        lambda v: at_work(v, goal, hot=hot), f"step {goal}", PATIENCE_S + STEP_S * steps
    )


async def killed(subject: Subject) -> Facts:
    """One run with ``--events`` kills of the worker with rank :data:`FOLLOWED`."""
    args, hot = subject.args, subject.way != "copy"

    async def disturb(cluster: LocalCluster, times: StoryTimes) -> None:
        for launcher in cluster.launchers.values():
            shares.give(launcher.pid)
        for number in range(args.events):
            view = await run_on(cluster, args.quiet, hot=hot)
            host = host_of(view, FOLLOWED)
            assert host is not None
            worker = next(w for w in host.workers if w.rank == FOLLOWED)
            await committed(cluster, worker.worker)
            await asyncio.sleep(place(subject, number) * worker.step_seconds)
            await story.event(cluster, times, partial(kill, cluster, host))
        await run_on(cluster, args.quiet, hot=hot)
        started.update(times.started)

    started: dict[str, float] = {}
    with CoreShares(len(RANKS) + len(STANDBY)) as shares:
        trace, found = await disturbed(subject, disturb, max_restarts=99, restart_delay_s=RESTART_S)
    return [
        {**facts(e, plan), **costs(trace, e, plan), "life": life(trace, e, started[plan.id])}
        for e, plan in found
    ]


def place(subject: Subject, number: int) -> float:
    """When in a step, from 0 to 1, kill ``number`` of this run comes. The kills of all repeats are
    spread evenly."""
    args = subject.args
    return (number * args.repeats + subject.repeat + 0.5) / (args.events * args.repeats)


async def committed(cluster: LocalCluster, worker: str) -> None:
    """Wait until ``worker`` has committed one more step."""
    file = cluster.trace / f"{worker.replace('/', '_')}.jsonl"
    size = file.stat().st_size
    await until(lambda: file.stat().st_size > size)


def life(trace: DemoTrace, event: DemoEvent, killed_at: float) -> list[list[Any]]:
    """What the ranks did around a kill: rank, step, whether it was committed, and when it began,
    came to its vote and ended, in seconds since the kill. A step that was undone ends at its vote.
    """
    near = 3 * event.median_step_s
    lines = [(line["step"], True, line) for line in trace.commits.values()]
    lines += [(line["undone"], False, {**line, "at": line["computed"]}) for line in trace.undone]
    return [
        [
            line["rank"],
            step,
            counts,
            *(round(line[k] - killed_at, 4) for k in ("began", "computed", "at")),
        ]
        for step, counts, line in sorted(
            lines, key=lambda entry: (entry[2]["rank"], entry[2]["began"])
        )
        if line["at"] > killed_at - near and line["began"] < killed_at + near
    ]


def costs(trace: DemoTrace, event: DemoEvent, plan: MigrationPlan) -> dict[str, float | None]:
    """What a loss costs, by measure: in seconds, or in steps for ``set_back_steps``."""
    set_back = gap_s(trace, plan) - event.median_step_s
    return {
        "beyond_step_s": event.idle_s if event.repeated_steps else None,
        "set_back_s": set_back,
        "set_back_steps": set_back / event.median_step_s,
    }


def tell(report: Report, runs: Runs, _: argparse.Namespace) -> dict[str, Any]:
    """Report rows and targets; return the figures."""
    figures: dict[str, Any] = {}
    for name, found in runs.items():
        shown = figures[name] = {key: each(found, key) for key in ROWS}
        shown["repeating"] = sum(bool(e["repeated_steps"]) for e in found)
        for key, (row, remark) in ROWS.items():
            report.row(f"{name}: {row}" if key == "set_back_s" else f"  {row}", shown[key], remark)
        for part in PARTS:
            shown[part] = each([e["split"] for e in found], part)
            report.row(f"  {part}", shown[part])
        way, size = name.split()
        if way == "hot":
            key, limit, unit = LIMITS.get(size, LIMIT)
            title = f"{name}: set back <= {limit} {unit}"
            report.target(title, shown[key].get("median"), limit, at_least=False)
    for size in dict.fromkeys(name.split()[1] for name in runs):
        if runs.get(f"hot {size}") and runs.get(f"repeat {size}"):
            figures[f"steady {size}"] = steady(report, runs, size)
    return figures


def steady(report: Report, runs: Runs, size: str) -> dict[str, float]:
    """What it costs, in undisturbed steps, that a broken step can be finished: the ratio of the
    step time to that of the way in which it is repeated, kill by kill."""
    kept, none = runs[f"hot {size}"], runs[f"repeat {size}"]
    found = summary(a["median_step_s"] / b["median_step_s"] for a, b in pairs(kept, none))
    report.row(f"{size}: ratio of steps", found, "finished, to repeated; before each kill")
    report.target(f"{size}: ratio of steps <= 1.01", found.get("median"), 1.01, at_least=False)
    return found


def main() -> int:
    return compare(Comparison("hot", __doc__, WAYS, "kills", 5, killed, tell, unable))


if __name__ == "__main__":
    raise SystemExit(main())
