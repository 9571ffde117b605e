"""What the benchmarks share that compare ways to do one thing to the demo's job at several model
sizes: the job, the oracle that every run must agree with, and all runs in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.downtime import RANKS, STANDBY, TINY
from bench.measure import Facts, Report, in_turn, options, parsed
from tmd import embedded
from tmd.core.values.limits import ShadowLimits
from tmd.core.values.model import MigrationPlan
from tmd.demo import train
from tmd.demo.cluster import ClusterSpec, LocalCluster
from tmd.demo.report import DemoEvent, DemoTrace, events_of, read_trace
from tmd.demo.story import StoryTimes

SIZES: dict[str, tuple[str, ...]] = {
    "10M": (),
    "60M": ("--width", "768", "--depth", "8", "--batch", "1", "--context", "32"),
    "140M": ("--width", "1280", "--depth", "7", "--batch", "1", "--context", "16"),
    "200M": ("--width", "1280", "--depth", "10", "--batch", "1", "--context", "16"),
}
MAPPED_FROM = 128 << 10
"""Bytes; glibc's own threshold at the start."""
Runs = dict[str, Facts]


class Oracle:
    """Every run of a size must have the losses of the first, as far as both went."""

    def __init__(self) -> None:
        self._first: dict[str, DemoTrace] = {}
        self.compared: dict[str, int] = {}

    def check(self, size: str, trace: DemoTrace) -> None:
        """Raises RuntimeError if a loss differs by a bit."""
        first = self._first.setdefault(size, trace)
        common = first.commits.keys() & trace.commits.keys()
        wrong = [k for k in common if first.commits[k]["loss"] != trace.commits[k]["loss"]]
        if wrong:
            raise RuntimeError(f"{len(wrong)} losses differ, first (rank, step) {min(wrong)}")
        if first is not trace:
            self.compared[size] = self.compared.get(size, 0) + len(common)


class Subject(NamedTuple):
    """One run that is to come."""

    way: str
    more_config: str
    folder: Path
    script: tuple[str, ...]
    args: argparse.Namespace
    repeat: int
    check: Callable[[DemoTrace], None]


class Comparison(NamedTuple):
    """What one benchmark is about."""

    name: str
    about: str | None
    ways: Mapping[str, str]
    """Name -> lines of ``[shadow]`` in the configuration."""
    what: str
    """The events that a run is disturbed by."""
    events: int
    run: Callable[[Subject], Coroutine[Any, Any, Facts]]
    tell: Callable[[Report, Runs, argparse.Namespace], dict[str, Any]]
    """Rows and targets; returns the figures."""
    unable: Callable[[], str] = str
    """Why this machine cannot run it; empty if it can."""


async def disturbed(
    subject: Subject,
    disturb: Callable[[LocalCluster, StoryTimes], Awaitable[None]],
    *,
    program: tuple[str, ...] = (train.__file__,),
    max_restarts: int = 0,
    restart_delay_s: float = 1.0,
) -> tuple[DemoTrace, list[tuple[DemoEvent, MigrationPlan]]]:
    """One run of ``program``, which ends with ``disturb``; what came of each event."""
    times = StoryTimes()
    command = (*program, "--steps", "100000", *subject.script)
    with embedded.redis() as redis:
        spec = ClusterSpec(
            subject.folder,
            redis.url,
            "bench",
            RANKS,
            STANDBY,
            command,
            max_restarts=max_restarts,
            restart_delay_s=restart_delay_s,
            more_config=subject.more_config,
        )
        async with LocalCluster(spec) as cluster:
            await disturb(cluster, times)
        trace = read_trace(cluster.trace)
    subject.check(trace)
    # One move per plan, so that events and plans go side by side.
    events = events_of(trace, times.plans, times.started, times.seen)
    return trace, list(zip(events, times.plans, strict=True))


def compare(what: Comparison) -> int:
    """All runs, in turn; returns the exit status."""
    parser = options(what.name, what.about, repeats=2)
    parser.add_argument("--events", type=int, default=what.events, help=f"{what.what} per repeat")
    parser.add_argument("--quiet", type=int, default=12, help=f"steps between two {what.what}")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["10M"])
    parser.add_argument("--ways", nargs="+", choices=what.ways, default=[*what.ways])
    staging = "host memory for what a joiner has not taken yet, less where memory is short"
    parser.add_argument("--staging-mb", type=float, default=ShadowLimits().staging_mb, help=staging)
    heap = "let glibc map each large tensor on its own, so that peaks show no torn heap; slower"
    parser.add_argument("--map-tensors", action="store_true", help=heap)
    args = parsed(parser)
    if why := what.unable():
        parser.error(why)
    if args.quick:
        args.repeats, args.events = 1, 1
    if args.map_tensors:
        # Inherited by all workers. As it is, glibc raises the threshold with each tensor freed.
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MAPPED_FROM)
    report = Report(what.name, args)
    subjects = {f"{way} {size}": (way, size) for size in args.sizes for way in args.ways}
    runs: Runs = {name: [] for name in subjects}
    oracle = Oracle()
    with tempfile.TemporaryDirectory(prefix="tmd-bench-") as scratch:
        for repeat, name in in_turn(args.repeats, tuple(subjects)):
            way, size = subjects[name]
            report.progress(f"repeat {repeat + 1} of {args.repeats}: {name}")
            folder = Path(scratch) / f"{way}-{size}-{repeat}"
            script = TINY if args.quick else SIZES[size]
            check = partial(oracle.check, size)
            config = f"[shadow]\nstaging_mb = {args.staging_mb}\n{what.ways[way]}"
            subject = Subject(way, config, folder, script, args, repeat, check)
            runs[name] += report.facts(name, repeat, partial(asyncio.run, what.run(subject)))
    report.progress(f"losses compared bit for bit between runs, by size: {oracle.compared}")
    figures = what.tell(report, runs, args)
    return report.finish(runs, {**figures, "losses compared": oracle.compared})
