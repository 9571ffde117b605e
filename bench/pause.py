"""How long a planned replacement holds training up, by live shadow and by stop-and-copy, at several
model sizes; in turn, one rank after the other going back and forth between two hosts.

``pause``: on a stayer, from the last commit in the old epoch to the first in the new, less the
median of the 20 steps before. Since it can lie below the noise of a step, the figure is its median
over all migrations with a 95 % interval (order statistics), and its part of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.downtime import RANKS, STANDBY, TINY, drain, event, facts, run_on
from bench.measure import Report, each, in_turn, options
from tmd import embedded
from tmd.core.model import MigrationPlan
from tmd.demo import train
from tmd.demo.cluster import ClusterSpec, LocalCluster
from tmd.demo.report import Trace, events_of, read_trace
from tmd.demo.story import DRAINED_RANK, Told

SIZES: dict[str, tuple[str, ...]] = {
    "10M": (),
    "60M": ("--width", "768", "--depth", "8", "--batch", "1", "--context", "32"),
    "200M": ("--width", "1280", "--depth", "10", "--batch", "1", "--context", "16"),
}
WAYS = {"shadow": "", "copy": "[shadow]\nenabled = false\n"}
LIMIT = 0.05
"""Of a step."""
GROWTH_LIMIT_MB = 5.0
"""Of a stayer, through all moves of a run."""
GROWTH = {
    "stayer_rss_growth_bytes": "growth of a stayer's peak, by move",
    "stayers_growth_bytes": "the same through all moves of a run",
    "source_growth_bytes": "growth of the leaver's peak",
}
Facts = list[dict[str, Any]]


class Oracle:
    """Every run of a size must have the losses of the first, as far as both went."""

    def __init__(self) -> None:
        self._first: dict[str, Trace] = {}
        self.compared: dict[str, int] = {}

    def check(self, size: str, trace: Trace) -> None:
        """Raises RuntimeError if a loss differs by a bit."""
        first = self._first.setdefault(size, trace)
        common = first.commits.keys() & trace.commits.keys()
        wrong = [k for k in common if first.commits[k]["loss"] != trace.commits[k]["loss"]]
        if wrong:
            raise RuntimeError(f"{len(wrong)} losses differ, first (rank, step) {min(wrong)}")
        if first is not trace:
            self.compared[size] = self.compared.get(size, 0) + len(common)


async def moved(
    folder: Path,
    script: tuple[str, ...],
    more_config: str,
    args: argparse.Namespace,
    check: Callable[[Trace], None],
) -> Facts:
    """One run with ``args.events`` drains."""
    told = Told()
    command = (train.__file__, "--steps", "100000", *script)
    with embedded.redis() as redis:
        spec = ClusterSpec(
            folder, redis.url, "bench", RANKS, STANDBY, command, more_config=more_config
        )
        async with LocalCluster(spec) as cluster:
            for _ in range(args.events):
                await event(cluster, told, args.quiet, DRAINED_RANK, drain)
            await run_on(cluster, args.quiet)
        trace = read_trace(cluster.trace)
    check(trace)
    found = events_of(trace, told.plans, told.started, told.seen)
    return [
        {
            **facts(e, plan),
            "how": plan.how,
            "lag_s": plan.timings.get("lag"),
            "part_of_step": (e.pause_s or 0.0) / e.median_step_s,
            "links_per_stayer": max(e.new_connections_per_stayer.values()),
            "source_growth_bytes": source_growth(trace, plan),
            "stayers_growth_bytes": stayers_growth(trace, told.plans[0]),
        }
        for e, plan in zip(found, told.plans, strict=True)
    ]


def source_growth(trace: Trace, plan: MigrationPlan) -> int:
    """By how much the peak memory of a leaver grew from the request to its last step."""
    move = plan.moves[0]
    own = [x for x in trace.of_rank(move.rank) if x["worker"] == move.leaver.worker]
    own = [x for x in own if x["epoch"] < plan.new.epoch]
    before = [x for x in own if x["at"] < plan.timeline[0].at]
    return int(own[-1]["rss_peak"] - before[-1]["rss_peak"]) if before else 0


def stayers_growth(trace: Trace, first: MigrationPlan) -> int:
    """By how much the peak of any stayer grew from before the first move to the end of the run."""
    stayers = [r for r in trace.ranks if r != first.moves[0].rank]
    grown = []
    for rank in stayers:
        lines = trace.of_rank(rank)
        before = [x for x in lines if x["at"] < first.timeline[0].at]
        grown.append(lines[-1]["rss_peak"] - before[-1]["rss_peak"])
    return int(max(grown))


def interval(values: list[float]) -> tuple[float, float] | None:
    """95 % interval of the median by order statistics; ``None`` for fewer than six values."""
    if len(values) < 6:
        return None
    ordered, n = sorted(values), len(values)
    reach = math.ceil(0.98 * math.sqrt(n))
    low, high = max(0, n // 2 - reach), min(n - 1, (n - 1) // 2 + reach)
    return ordered[low], ordered[high]


def tell(report: Report, runs: dict[str, Facts], args: argparse.Namespace) -> dict[str, Any]:
    """Rows and targets; returns the figures."""
    figures: dict[str, Any] = {}
    for name, found in runs.items():
        if not found:
            continue
        shown = figures[name] = {
            key: each(found, key)
            for key in (
                *("pause_s", "part_of_step", "median_step_s", "lag_s", "links_per_stayer"),
                "copy_s",
            )
        }
        shown["pause_s"]["interval_95"] = interval([e["pause_s"] for e in found])
        report.row(f"{name}: pause", shown["pause_s"], "beyond one step")
        report.row("  95 % interval", {**shown["pause_s"], **_between(shown)}, "of the median")
        report.row("  as part of a step", shown["part_of_step"], "not seconds")
        report.row("  median step", shown["median_step_s"], "before the move")
        report.row("  links per stayer", shown["links_per_stayer"], "not seconds")
        for key, title in GROWTH.items():
            shown[key] = each([{"mb": e[key] / 1e6} for e in found], "mb")
            report.row(f"  {title}", shown[key], "MB")
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
    parser = options("pause", __doc__, repeats=2)
    parser.add_argument("--events", type=int, default=10, help="migrations per repeat")
    parser.add_argument("--quiet", type=int, default=12, help="steps between two migrations")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["10M"])
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.events = 1, 1
    report = Report("pause", args)
    subjects = {f"{way} {size}": (way, size) for size in args.sizes for way in WAYS}
    runs: dict[str, Facts] = {name: [] for name in subjects}
    oracle = Oracle()
    with tempfile.TemporaryDirectory(prefix="tmd-bench-") as scratch:
        for repeat, name in in_turn(args.repeats, tuple(subjects)):
            way, size = subjects[name]
            report.progress(f"repeat {repeat + 1} of {args.repeats}: {name}")
            folder = Path(scratch) / f"{way}-{size}-{repeat}"
            script = TINY if args.quick else SIZES[size]
            disturbed = moved(folder, script, WAYS[way], args, partial(oracle.check, size))
            runs[name] += report.attempt(name, partial(asyncio.run, disturbed)) or []
    report.progress(f"losses compared bit for bit between runs, by size: {oracle.compared}")
    return report.finish(runs, {**tell(report, runs, args), "losses compared": oracle.compared})


if __name__ == "__main__":
    raise SystemExit(main())
