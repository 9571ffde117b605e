"""How long the first real step of a worker takes that has just got a rank, as a part of a usual
step: standbys that have rehearsed beside standbys that have only run neutral iterations.

The model is compiled (inductor), the data come from loader processes, the gradients in DDP's
buckets: all that is slow the first time. With ``--by-hand`` the script sums them itself, and there
are standbys that have run nothing at all. ``kill``: from the leader's word to go on to the first
commit of the last rank. ``drain``: the step in which the rank changes hands, on stayers; there the
joiner has computed real steps in any case.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from bench import by_hand_train
from bench.downtime import PATIENCE_S, RANKS, STANDBY, TINY, drain, kill
from bench.measure import Facts, Report, each, in_turn, options, parsed
from tmd import embedded
from tmd.core.values.model import Activity, ClusterView, MigrationPlan, Phase
from tmd.demo import story, train
from tmd.demo.cluster import ClusterSpec, LocalCluster, host_of, workers
from tmd.demo.report import DemoEvent, DemoTrace, events_of, read_trace
from tmd.demo.story import StoryTimes

ACTS = ("kill", "drain")
NEVER = "[shadow]\nrehearse = false\n"
WAYS = {"rehearsed": "", "neutral": NEVER, "cold": NEVER}
MOVED = 2
QUIET = 12
LIMIT = 1.1
COMPILE_S = 300.0


def at_work(view: ClusterView, step: int, *, rehearsed: bool) -> bool:
    """All ranks have come to ``step``, and a standby waits that never held a rank."""
    training = [w.step for w in workers(view) if w.activity is Activity.TRAINING]
    waiting = [w for w in workers(view) if w.activity is Activity.STANDBY]
    there = any(w.rehearsed for w in waiting) if rehearsed else bool(waiting)
    return there and len(training) == len(RANKS) and min(training) >= step


def command(args: argparse.Namespace, way: str) -> tuple[str, ...]:
    """What is launched."""
    chosen = by_hand_train if args.by_hand else train
    compiled = () if args.no_compile else ("--compile",)
    cold = ("--cold",) if way == "cold" else ()
    tiny = TINY if args.quick else ()
    more = (*compiled, *cold, *tiny)
    return ("-m", chosen.__name__, "--steps", "100000", "--loader-workers", "1", *more)


async def run(folder: Path, script: tuple[str, ...], way: str, act: str) -> Facts:
    """One run with one kill or drain."""
    times, rehearsed = StoryTimes(), way == "rehearsed"
    with embedded.redis() as redis:
        spec = ClusterSpec(
            folder, redis.url, "bench", RANKS, STANDBY, script, more_config=WAYS[way]
        )
        async with LocalCluster(spec) as cluster:
            view = await cluster.until(
                lambda v: at_work(v, 1, rehearsed=rehearsed), "all at work", COMPILE_S
            )
            goal = max(w.step for w in workers(view)) + QUIET
            view = await cluster.until(
                lambda v: at_work(v, goal, rehearsed=rehearsed), "quiet steps", COMPILE_S
            )
            host = host_of(view, MOVED)
            assert host is not None
            does = kill if act == "kill" else drain
            await story.event(cluster, times, partial(does, cluster, host))
            goal = max(w.step for w in workers(await cluster.view())) + QUIET
            await cluster.until(
                lambda v: max((w.step for w in workers(v)), default=0) >= goal, "on", PATIENCE_S
            )
        trace = read_trace(cluster.trace)
    (plan,) = times.plans
    (event,) = events_of(trace, times.plans, times.started, times.seen)
    seconds = first_step(trace, plan, event)
    return [
        {
            "first_step_s": seconds,
            "usual_step_s": event.median_step_s,
            "ratio": seconds / event.median_step_s,
            "how": plan.how or plan.kind.value,
        }
    ]


def first_step(trace: DemoTrace, plan: MigrationPlan, event: DemoEvent) -> float:
    """Seconds of the first step in the new epoch, to the commit of the last rank."""
    lines = [trace.of_rank(rank) for rank in trace.ranks]
    new = [next(x for x in of_rank if x["epoch"] >= plan.new.epoch) for of_rank in lines]
    after = max(x["at"] for x in new)
    if event.pause_s is not None:
        return event.pause_s + event.median_step_s
    return after - next(mark.at for mark in plan.timeline if mark.phase is Phase.RESUME)


def tell(report: Report, runs: dict[str, Facts]) -> dict[str, Any]:
    """Rows and targets; returns the figures."""
    figures: dict[str, Any] = {}
    for name, found in runs.items():
        figures[name] = {key: each(found, key) for key in ("ratio", "first_step_s", "usual_step_s")}
        report.row(f"{name}: first step / usual", figures[name]["ratio"], "a ratio")
        report.row("  first step", figures[name]["first_step_s"])
        report.row("  usual step", figures[name]["usual_step_s"])
        if name.startswith("rehearsed"):
            median = figures[name]["ratio"].get("median")
            report.target(f"{name}: ratio <= {LIMIT}", median, LIMIT, at_least=False)
    return figures


def main() -> int:
    parser = options("first_step", __doc__)
    parser.add_argument("--no-compile", action="store_true", help="leave the compiler out")
    parser.add_argument(
        "--acts", nargs="+", choices=ACTS, default=ACTS, help="what happens to a rank"
    )
    by_hand = "sum gradients without DDP, and compare with standbys that have run nothing, too"
    parser.add_argument("--by-hand", action="store_true", help=by_hand)
    args = parsed(parser)
    if args.quick:
        args.repeats, args.no_compile = 1, True
    report = Report("first_step", args)
    ways = [way for way in WAYS if way != "cold" or args.by_hand]
    subjects = {f"{way} {act}": (way, act) for act in args.acts for way in ways}
    runs: dict[str, Facts] = {name: [] for name in subjects}
    with tempfile.TemporaryDirectory(prefix="tmd-bench-") as scratch:
        for repeat, name in in_turn(args.repeats, tuple(subjects)):
            report.progress(f"repeat {repeat + 1} of {args.repeats}: {name}")
            folder = Path(scratch) / f"{name.replace(' ', '-')}-{repeat}"
            way, act = subjects[name]
            job = run(folder, command(args, way), way, act)
            runs[name] += report.attempt(name, partial(asyncio.run, job)) or []
    return report.finish(runs, tell(report, runs))


if __name__ == "__main__":
    raise SystemExit(main())
