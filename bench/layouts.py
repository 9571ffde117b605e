"""What it costs in each parallel layout to move a host, and to lose one: four ranks on two hosts, a
host of two standbys, small models, all ranks of a host at once; layouts in turn.

``pause``: on the stayers, from the last commit in the old epoch to the first in the new, less the
median of the steps before; as part of a step. ``downtime``: from the kill of both workers of a host
to the first commit of a step that had not been committed, less one median step. The survivors end
what they compute first, so the losses are spread evenly over a step. Each step takes
``--pace`` seconds more than this machine computes, as on a device of each rank's own: otherwise six
processes would share two cores, and the joiners' own work would count as a pause of the others.
Batches come from ``session.sampler``: other samplers are walked through up to the rank's place.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.downtime import drain, facts, run_on
from bench.measure import Facts, Report, each, in_turn, options, parsed
from tests.e2e import layouts
from tmd import embedded
from tmd.core.values.model import HostStatus
from tmd.demo import story
from tmd.demo.cluster import ClusterSpec, LocalCluster
from tmd.demo.report import events_of, median_step, read_trace
from tmd.demo.story import StoryTimes

STAGES = Path(layouts.__file__).with_name("stages.py")
"""The script for layouts whose ranks do not build alike."""
ACTIVE, STANDBY, PER_HOST = ("h1", "h2"), ("h3",), 2
RANKS = len(ACTIVE) * PER_HOST
ONCE = ("both", "single", "zero")
"""Layouts in which a state exists once: there a lost host costs a roll-back, not measured here."""
STAGED = ("unlike", "pipeline", "single", "zero")
"""Layouts whose ranks do not build alike."""
LAYOUTS = (*layouts.LAYOUTS, *STAGED)
PART_LIMIT, DOWNTIME_LIMIT_S = 0.05, 0.3
Act = Callable[[LocalCluster, HostStatus], Awaitable[None]]


async def kill(cluster: LocalCluster, host: HostStatus) -> None:
    """Both workers at once; their launcher starts them again, as standbys."""
    for worker in host.workers:
        os.kill(worker.pid, signal.SIGKILL)


def until(trace: Path, phase: float) -> float:
    """Seconds until some next step is computed so far, if all take as long as the latest ones. The
    view of the cluster lags behind by up to half a step."""
    lines = read_trace(trace).of_rank(0)[-8:]
    step = median_step(lines)
    into = (time.time() - lines[-1]["at"]) / step
    return float(step * ((phase - into) % 1.0))


async def disturbed(folder: Path, layout: str, repeat: int, args: argparse.Namespace) -> Facts:
    """One run with ``args.events`` drains and, where the state has replicas, as many losses."""
    times = StoryTimes()
    pace = ("--steps", "100000", "--pace", str(args.pace))
    command: tuple[str, ...] = (str(STAGES), layout, *pace)
    if layout not in STAGED:
        command = (layouts.__file__, layout, *pace, "--seekable")
    acts: tuple[Act, ...] = (drain,) if layout in ONCE else (drain, kill)
    with embedded.redis() as redis:
        spec = ClusterSpec(
            folder,
            redis.url,
            "bench",
            ACTIVE,
            STANDBY,
            command,
            per_host=PER_HOST,
            max_restarts=99,
            # The script that stages are in takes some of the other one.
            environment={"PYTHONPATH": str(STAGES.parents[2])},
        )
        async with LocalCluster(spec) as cluster:
            for number, act in enumerate(acts * args.events):
                view = await run_on(cluster, args.quiet)
                if act is kill:
                    # A loss may come at any time of a step.
                    loss = repeat * args.events + number // 2
                    phase = (loss + 0.5) / (args.repeats * args.events)
                    await asyncio.sleep(until(cluster.trace, phase))
                host = view.host(view.jobs[0].membership.members[-1].host)
                assert host is not None
                await story.event(cluster, times, partial(act, cluster, host))
            await run_on(cluster, args.quiet)
        trace = read_trace(cluster.trace)
    found = []
    for plan in times.plans:
        event = events_of(trace, [plan], times.started, times.seen)[0]  # alike for both ranks
        links = max(event.new_connections_per_stayer.values())
        part = None if event.pause_s is None else event.pause_s / event.median_step_s
        more = {"how": plan.how, "part_of_step": part, "links_per_stayer": links}
        found.append({**facts(event, plan), **more})
    return found


def tell(report: Report, runs: dict[str, Facts]) -> dict[str, Any]:
    """Rows and targets; returns the figures."""
    figures: dict[str, Any] = {}
    for layout, found in runs.items():
        moves = [e for e in found if e["kind"] == "planned"]
        losses = [e for e in found if e["kind"] == "failover"]
        shown = figures[layout] = {
            "pause_s": each(moves, "pause_s"),
            "part_of_step": each(moves, "part_of_step"),
            "downtime_less_copy_s": each(losses, "beyond_copy_s"),
            "copy_s": each(losses, "copy_s"),
            "median_step_s": each(found, "median_step_s"),
            "links_per_stayer": each(found, "links_per_stayer"),
            "by live shadow": sum(e["how"] == "live shadow" for e in moves),
        }
        report.row(f"{layout}: pause of a drain", shown["pause_s"], "beyond one step")
        report.row("  as part of a step", shown["part_of_step"], "not seconds")
        report.row("  downtime less copy", shown["downtime_less_copy_s"], "beyond one step")
        report.row("  copy of the state", shown["copy_s"])
        report.row("  median step", shown["median_step_s"])
        report.row("  links per stayer", shown["links_per_stayer"], "not seconds")
        part, down = shown["part_of_step"], shown["downtime_less_copy_s"]
        title = f"{layout}: pause / step <= {PART_LIMIT}"
        report.target(title, part.get("median"), PART_LIMIT, at_least=False)
        if losses:
            title = f"{layout}: downtime less copy <= {DOWNTIME_LIMIT_S} s"
            report.target(title, down.get("median"), DOWNTIME_LIMIT_S, at_least=False)
    return figures


def main() -> int:
    parser = options("layouts", __doc__)
    parser.add_argument("--events", type=int, default=1, help="drains, and losses, per repeat")
    parser.add_argument("--quiet", type=int, default=8, help="steps between two events")
    parser.add_argument("--pace", type=float, default=0.4, help="seconds added to each step")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=[*LAYOUTS])
    args = parsed(parser)
    if args.quick:
        args.repeats = args.events = 1
    report = Report("layouts", args)
    runs: dict[str, Facts] = {layout: [] for layout in args.layouts}
    with tempfile.TemporaryDirectory(prefix="tmd-bench-") as scratch:
        for repeat, layout in in_turn(args.repeats, args.layouts):
            report.progress(f"repeat {repeat + 1} of {args.repeats}: {layout}")
            run = disturbed(Path(scratch) / f"{layout}-{repeat}", layout, repeat, args)
            runs[layout] += report.attempt(layout, partial(asyncio.run, run)) or []
    return report.finish(runs, tell(report, runs))


if __name__ == "__main__":
    raise SystemExit(main())
