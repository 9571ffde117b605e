"""How long training stands still when a worker is killed whose rank a hot standby follows, and when
nobody follows it, at several model sizes, in turn.

``downtime``: from the kill to the first commit of a step that had not been committed, on the last
rank, less one median step; also split as in ``bench.downtime``. The killed worker is started again,
as a standby, on the same cores while the job recovers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.downtime import PATIENCE_S, RANKS, STANDBY, TINY, facts, kill
from bench.measure import Report, each, in_turn, options
from bench.pause import SIZES, Oracle
from tmd import embedded
from tmd.core.model import Activity, ClusterView
from tmd.demo import story, train
from tmd.demo.cluster import ClusterSpec, LocalCluster, host_of, workers
from tmd.demo.report import Trace, events_of, read_trace
from tmd.demo.story import Told

FOLLOWED = len(RANKS) - 1
"""The rank that the first hot standby follows."""
WAYS = {"hot": "[shadow]\nhot = 1\n", "copy": ""}
LIMIT_S = 0.1
Facts = list[dict[str, Any]]


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
        lambda v: at_work(v, goal, hot=hot), f"step {goal}", PATIENCE_S + 20 * steps
    )


async def killed(
    folder: Path,
    script: tuple[str, ...],
    way: str,
    args: argparse.Namespace,
    check: Callable[[Trace], None],
) -> Facts:
    """One run with ``args.events`` kills of the worker whose rank is followed."""
    told, hot = Told(), way == "hot"
    command = (train.__file__, "--steps", "100000", *script)
    with embedded.redis() as redis:
        spec = ClusterSpec(
            folder,
            redis.url,
            "bench",
            RANKS,
            STANDBY,
            command,
            max_restarts=99,
            more_config=WAYS[way],
        )
        async with LocalCluster(spec) as cluster:
            for _ in range(args.events):
                view = await run_on(cluster, args.quiet, hot=hot)
                # At no particular point of a step.
                await asyncio.sleep(random.uniform(0, max(w.step_seconds for w in workers(view))))
                host = host_of(view, FOLLOWED)
                assert host is not None
                await story.event(cluster, told, partial(kill, cluster, host))
            await run_on(cluster, args.quiet, hot=hot)
        trace = read_trace(cluster.trace)
    check(trace)
    found = events_of(trace, told.plans, told.started, told.seen)
    return [facts(e, plan) for e, plan in zip(found, told.plans, strict=True)]


def tell(report: Report, runs: dict[str, Facts]) -> dict[str, Any]:
    """Rows and targets; returns the figures."""
    figures: dict[str, Any] = {}
    for name, found in runs.items():
        down = each(found, "downtime_s")
        figures[name] = {"downtime_s": down, "median_step_s": each(found, "median_step_s")}
        report.row(f"{name}: downtime", down, "beyond one step")
        for part in ("detect", "decide", "prepare", "transfer", "resume"):
            figures[name][part] = each([e["split"] for e in found], part)
            report.row(f"  {part}", figures[name][part])
        report.row("  median step", figures[name]["median_step_s"])
        if name.startswith("hot"):
            title = f"{name}: downtime beyond one step <= {LIMIT_S} s"
            report.target(title, down.get("median"), LIMIT_S, at_least=False)
    return figures


def main() -> int:
    parser = options("hot", __doc__, repeats=2)
    parser.add_argument("--events", type=int, default=5, help="kills per repeat")
    parser.add_argument("--quiet", type=int, default=12, help="steps between two kills")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["10M"])
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.events = 1, 1
    report = Report("hot", args)
    subjects = {f"{way} {size}": (way, size) for size in args.sizes for way in WAYS}
    runs: dict[str, Facts] = {name: [] for name in subjects}
    oracle = Oracle()
    with tempfile.TemporaryDirectory(prefix="tmd-bench-") as scratch:
        for repeat, name in in_turn(args.repeats, tuple(subjects)):
            way, size = subjects[name]
            report.progress(f"repeat {repeat + 1} of {args.repeats}: {name}")
            folder = Path(scratch) / f"{way}-{size}-{repeat}"
            script = TINY if args.quick else SIZES[size]
            disturbed = killed(folder, script, way, args, partial(oracle.check, size))
            runs[name] += report.attempt(name, partial(asyncio.run, disturbed)) or []
    report.progress(f"losses compared bit for bit between runs, by size: {oracle.compared}")
    return report.finish(runs, {**tell(report, runs), "losses compared": oracle.compared})


if __name__ == "__main__":
    raise SystemExit(main())
