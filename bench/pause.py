"""How long a planned replacement holds training up, by live shadow (of outputs, or of gradients
only) and by stop-and-copy, at several model sizes; in turn, one rank after the other going back and
forth between two hosts. Beside it how long torchrun stands still when a rank is killed and all are
restarted on the same host, from a checkpoint of the step before; and by how much the memory of a
rank grows in as many steps of a run in which nothing moves.

``pause``: on a stayer, from the last commit in the old epoch to the first in the new, less the
median of the 20 steps before. Since it can lie below the noise of a step, the figure is its median
over all migrations with a 95 % interval (order statistics), and its part of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from bench.downtime import drain, event, facts, restarted, run_on
from bench.measure import Facts, Report, each, interval, summary
from bench.sizes import Comparison, Runs, Subject, compare, disturbed
from tmd.core.values.model import MigrationPlan
from tmd.demo.cluster import LocalCluster
from tmd.demo.report import DemoTrace
from tmd.demo.story import DRAINED_RANK, StoryTimes

RESTART, NOTHING = "torchrun", "nothing"
WAYS = {
    "shadow": "",
    "gradients": 'mirror = "gradients"\n',
    "copy": "enabled = false\n",
    RESTART: "",
    NOTHING: "",
}
STEPS_OF_A_MOVE = 10
"""From the request to the switch, by live shadow."""
RESTARTS = 5
"""Of torchrun, in all repeats: each is a run of its own."""
LIMIT = 0.05
"""Of a step."""
GROWTH_LIMIT_MB = 5.0
"""Of a stayer, through all moves of a run."""
SHOWN = ("pause_s", "part_of_step", "median_step_s", "lag_s", "links_per_stayer", "copy_s")
GROWTH = {
    "stayer_rss_growth_bytes": "growth of a stayer's peak, by move",
    "stayers_growth_bytes": "the same through all moves of a run",
    "source_growth_bytes": "growth of the leaver's peak",
}
UNKNOWN = dict.fromkeys((*SHOWN, *GROWTH))
"""Of a run that shows only some of it."""


async def undisturbed(subject: Subject) -> Facts:
    """One run with as many steps as one with moves has, as a rule."""
    quiet, moves, begin = subject.args.quiet, subject.args.events, 0.0

    async def look_on(cluster: LocalCluster, _: StoryTimes) -> None:
        nonlocal begin
        await run_on(cluster, quiet)
        begin = time.time()
        await run_on(cluster, moves * (quiet + STEPS_OF_A_MOVE))

    trace, _ = await disturbed(subject, look_on)
    return [{**UNKNOWN, "stayers_growth_bytes": growth(trace, trace.ranks, begin)}]


async def restarts(subject: Subject) -> Facts:
    """Several runs of torchrun, one after the other."""
    runs = 1 if subject.args.quick else math.ceil(RESTARTS / subject.args.repeats)
    return [await asyncio.to_thread(restart, subject, number) for number in range(runs)]


def restart(subject: Subject, number: int) -> dict[str, Any]:
    """Run ``number`` of torchrun, with as many quiet steps before as others have between two."""
    folder, quiet = subject.folder / str(number), subject.args.quiet
    found = restarted(folder, subject.script, quiet, 2)
    (folder / "checkpoint").unlink()
    return {**UNKNOWN, **found, "part_of_step": found["pause_s"] / found["median_step_s"]}


async def moved(subject: Subject) -> Facts:
    """One run with ``--events`` drains."""
    args = subject.args

    async def disturb(cluster: LocalCluster, times: StoryTimes) -> None:
        for _ in range(args.events):
            await event(cluster, times, args.quiet, DRAINED_RANK, drain)
        await run_on(cluster, args.quiet)

    trace, found = await disturbed(subject, disturb)
    return [
        {
            **facts(e, plan),
            "how": plan.how,
            "lag_s": plan.timings.get("lag"),
            "part_of_step": (e.pause_s or 0.0) / e.median_step_s,
            "links_per_stayer": max(e.new_connections_per_stayer.values()),
            "source_growth_bytes": source_growth(trace, plan),
            "stayers_growth_bytes": stayers_growth(trace, found[0][1]),
        }
        for e, plan in found
    ]


def source_growth(trace: DemoTrace, plan: MigrationPlan) -> int:
    """By how much the peak memory of a leaver grew from the request to its last step."""
    move = plan.moves[0]
    own = [x for x in trace.of_rank(move.rank) if x["worker"] == move.leaver.worker]
    own = [x for x in own if x["epoch"] < plan.new.epoch]
    before = [x for x in own if x["at"] < plan.timeline[0].at]
    return int(own[-1]["rss_peak"] - before[-1]["rss_peak"]) if before else 0


def stayers_growth(trace: DemoTrace, first: MigrationPlan) -> int:
    """By how much the peak of any stayer grew from before the first move to the end of the run."""
    stayers = [r for r in trace.ranks if r != first.moves[0].rank]
    return growth(trace, stayers, first.timeline[0].at)


def growth(trace: DemoTrace, ranks: Sequence[int], begin: float) -> int:
    """By how many bytes the peak of any of ``ranks`` grew from ``begin`` to the end of the run."""
    grown = []
    for rank in ranks:
        lines = trace.of_rank(rank)
        before = [x["rss_peak"] for x in lines if x["at"] < begin]
        grown.append(lines[-1]["rss_peak"] - before[-1])
    return int(max(grown))


RUNS: dict[str, Callable[[Subject], Coroutine[Any, Any, Facts]]] = {
    "shadow": moved,
    "gradients": moved,
    "copy": moved,
    RESTART: restarts,
    NOTHING: undisturbed,
}


def tell(report: Report, runs: Runs, args: argparse.Namespace) -> dict[str, Any]:
    """Rows and targets; returns the figures."""
    figures: dict[str, Any] = {}
    for name, found in runs.items():
        if not found:
            continue
        shown = figures[name] = {key: each(found, key) for key in SHOWN}
        if shown["pause_s"]["n"]:
            shown["pause_s"]["interval_95"] = interval([e["pause_s"] for e in found])
            report.row(f"{name}: pause", shown["pause_s"], "beyond one step")
            report.row("  95 % interval", {**shown["pause_s"], **_between(shown)}, "of the median")
            report.row("  as part of a step", shown["part_of_step"], "not seconds")
            report.row("  median step", shown["median_step_s"], "before the move")
            report.row("  links per stayer", shown["links_per_stayer"], "not seconds")
        for key, title in GROWTH.items():
            shown[key] = summary(e[key] / 1e6 for e in found if e[key] is not None)
            if shown[key]["n"]:
                report.row(f"{name}: {title}", shown[key], "MB")
        if name.startswith("shadow"):
            part = shown["part_of_step"].get("median")
            report.target(f"{name}: pause / step <= {LIMIT}", part, LIMIT, at_least=False)
            most = shown["stayers_growth_bytes"].get("max")
            title = f"{name}: growth of a stayer, {args.events} moves <= {GROWTH_LIMIT_MB} MB"
            report.target(title, most, GROWTH_LIMIT_MB, at_least=False)
    return figures


def _between(shown: dict[str, Any]) -> dict[str, float]:
    low, high = shown["pause_s"]["interval_95"] or (math.nan, math.nan)
    return {"min": low, "max": high}


def main() -> int:
    return compare(
        Comparison("pause", __doc__, WAYS, "migrations", 10, lambda s: RUNS[s.way](s), tell)
    )


if __name__ == "__main__":
    raise SystemExit(main())
