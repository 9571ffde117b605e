"""How long training stands still: a worker killed and a host drained under tmd, and under torchrun
a worker killed with a checkpoint after every step. Under tmd with ``leave_early=True``, too: the
survivors of a kill then do not compute the broken step to its end.

``downtime``: from the kill to the first commit of a step that had not been committed, on the last
rank, less one median step. ``pause``: between the last commit before a planned switch and the first
after it, less one median step. The job is the demo's, with four ranks and one standby; all run on
this machine, so that processes that start compete with those that train, with tmd as with torchrun.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from bench import rivals
from bench.measure import Facts, Report, each, in_turn, options, parsed
from tmd import embedded
from tmd.core.values.model import ClusterView, HostStatus, MigrationPlan
from tmd.demo import story, train
from tmd.demo.cluster import ClusterSpec, LocalCluster, host_of, ready, workers
from tmd.demo.report import PARTS, events_of, read_trace
from tmd.demo.story import DRAINED_RANK, KILLED_RANK, StoryTimes

RANKS = ("host-1", "host-2", "host-3", "host-4")
STANDBY = ("host-5",)
TINY = ("--width", "64", "--depth", "2", "--heads", "4")
KILL_STEP = 25
QUIET_STEPS = 20
"""Steps without an event before each: those of which the report takes the median."""
PATIENCE_S = 300.0
STEP_S = 20.0
"""Longest step, with room to spare."""
RUN_S = 600.0


def under_tmd(folder: Path, script: tuple[str, ...], args: argparse.Namespace) -> Facts:
    """One run with drains and kills; long enough for all, it is stopped after the last."""
    command = (train.__file__, "--steps", "100000", *script)
    return asyncio.run(disturbed(folder, command, args))


async def disturbed(folder: Path, command: tuple[str, ...], args: argparse.Namespace) -> Facts:
    """One run with ``args.events`` drains and as many kills, in turn."""
    times = StoryTimes()
    quiet = 5 if args.quick else QUIET_STEPS
    with embedded.redis() as redis:
        spec = ClusterSpec(
            folder, redis.url, "bench", RANKS, STANDBY, command, max_restarts=args.max_restarts
        )
        async with LocalCluster(spec) as cluster:
            for _ in range(args.events):
                await event(cluster, times, quiet, DRAINED_RANK, drain)
                killed = await event(cluster, times, quiet, KILLED_RANK, kill)
                if cluster.spec.max_restarts == 0:
                    await cluster.launchers[killed].wait()
                    await cluster.start_launcher(killed)
            await run_on(cluster, quiet)
        events = events_of(read_trace(cluster.trace), times.plans, times.started, times.seen)
    # One move per plan, so that events and plans go side by side.
    return [facts(e, plan) for e, plan in zip(events, times.plans, strict=True)]


async def run_on(cluster: LocalCluster, steps: int) -> ClusterView:
    """Wait until all standbys are there, and then for ``steps`` more steps of every rank."""
    spec = cluster.spec
    ranks, spare = (len(hosts) * spec.per_host for hosts in (spec.active, spec.standby))
    view = await cluster.until(
        lambda v: ready(v, ranks, spare), "all ranks train, the standbys wait", PATIENCE_S
    )
    goal = max(w.step for w in workers(view)) + steps
    return await cluster.until(
        lambda v: ready(v, ranks, spare, goal), f"step {goal}", PATIENCE_S + STEP_S * steps
    )


async def event(
    cluster: LocalCluster,
    times: StoryTimes,
    quiet: int,
    rank: int,
    act: Callable[[LocalCluster, HostStatus], Awaitable[None]],
) -> str:
    """Let it happen to the host of ``rank`` after some quiet steps; returns its name."""
    view = await run_on(cluster, quiet)
    # At no particular point of a step.
    await asyncio.sleep(random.uniform(0, max(w.step_seconds for w in workers(view))))
    host = host_of(view, rank)
    assert host is not None
    await story.event(cluster, times, lambda: act(cluster, host))
    return host.host


async def drain(cluster: LocalCluster, host: HostStatus) -> None:
    """What ``tmd drain`` does; the host stands by afterwards."""
    await cluster.drain(host.host, soft=True)


async def kill(cluster: LocalCluster, host: HostStatus) -> None:
    """Kill -9 of a worker."""
    os.kill(host.workers[-1].pid, signal.SIGKILL)


def facts(event: Any, plan: MigrationPlan) -> dict[str, Any]:
    """One event for the file. The copy: from the link of the joiner to the digest it agreed to."""
    copy = plan.timings.get("transfer", 0.0)
    size = plan.timings.get("copy_bytes")
    stop = event.downtime_s if event.pause_s is None else event.pause_s
    return {
        **msgspec.to_builtins(event),
        "copy_s": copy,
        "copy_bytes": size,
        "copy_gb_s": size / copy / 1e9 if size and copy else None,
        "beyond_copy_s": stop - copy,
    }


def left_early(folder: Path, script: tuple[str, ...], args: argparse.Namespace) -> Facts:
    """The same with steps that are left early."""
    return under_tmd(folder, (*script, "--leave-early"), args)


def under_torchrun(folder: Path, script: tuple[str, ...], args: argparse.Namespace) -> Facts:
    """One run in which a rank kills itself once."""
    return [restarted(folder, script, 6 if args.quick else KILL_STEP, 5)]


def restarted(folder: Path, script: tuple[str, ...], step: int, more: int) -> dict[str, Any]:
    """What torchrun makes of a kill in ``step``, and ``more`` steps after it; it saves after each.

    Raises:
        RuntimeError: it failed, or did not come back.
    """
    arguments = (
        *("--checkpoint", str(folder / "checkpoint"), "--kill-rank", str(KILLED_RANK)),
        *("--kill-step", str(step), "--steps", str(step + more), *script),
    )
    return rivals.outage(rivals.torchrun(arguments, len(RANKS), folder, RUN_S))


def tell(report: Report, runs: dict[str, Facts]) -> dict[str, Any]:
    """Rows and targets; returns the figures."""
    failovers = [e for e in runs["tmd"] if e["kind"] == "failover"]
    drains = [e for e in runs["tmd"] if e["kind"] == "planned"]
    figures: dict[str, Any] = {}

    def row(name: str, found: Facts, key: str, remark: str = "") -> float | None:
        shown = figures[name.strip()] = each(found, key)
        report.row(name, shown, remark)
        return shown.get("median")

    ours = row("tmd: downtime after kill -9", failovers, "downtime_s", "beyond one step")
    for part in PARTS:
        row(f"  {part}", [e["split"] for e in failovers], part)
    failover_rest = row("  downtime less copy", failovers, "beyond_copy_s")
    row("tmd: pause of a drain", drains, "pause_s", "beyond one step")
    row("  copy of the state", drains, "copy_s")
    drain_rest = row("  pause less copy", drains, "beyond_copy_s")
    early = [e for e in runs["left early"] if e["kind"] == "failover"]
    left = row("tmd, left early: downtime after kill -9", early, "downtime_s", "beyond one step")
    figures["left early: prepare"] = each([e["split"] for e in early], "prepare")
    report.row("  prepare, left early", figures["left early: prepare"], "the broken step's rest")
    speed = row("copy in GB/s, both", runs["tmd"], "copy_gb_s", "not seconds")
    row("tmd: median step", runs["tmd"], "median_step_s", "before an event")
    theirs = row("torchrun: downtime after kill -9", runs["torchrun"], "downtime_s", "same")
    row("  median step", runs["torchrun"], "median_step_s", "saves after each")
    row("  repeated steps", runs["torchrun"], "repeated_steps", "not seconds")
    ratio = theirs / ours if ours and theirs and ours > 0 else None
    figures["ratio torchrun/tmd"] = ratio
    report.target("downtime less copy <= 0.3 s", failover_rest, 0.3, at_least=False)
    report.target("downtime, left early <= 0.13 s", left, 0.13, at_least=False)
    report.target("pause less copy <= 0.05 s", drain_rest, 0.05, at_least=False)
    report.target("copy >= 1 GB/s", speed, 1.0, at_least=True)
    report.target("downtime of torchrun / tmd >= 20", ratio, 20.0, at_least=True)
    return figures


RUNS = {"tmd": under_tmd, "left early": left_early, "torchrun": under_torchrun}


def main() -> int:
    parser = options("downtime", __doc__)
    parser.add_argument("--events", type=int, default=2, help="drains, and kills, per repeat")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=99,
        help="0: a killed worker is started again only after the recovery, not during it",
    )
    args = parsed(parser)
    if args.quick:
        args.repeats = args.events = 1
    report = Report("downtime", args)
    script = TINY if args.quick else ()
    runs: dict[str, Facts] = {subject: [] for subject in RUNS}
    with tempfile.TemporaryDirectory(prefix="tmd-bench-") as scratch:
        for repeat, subject in in_turn(args.repeats, tuple(RUNS)):
            report.progress(f"repeat {repeat + 1} of {args.repeats}: {subject}")
            folder = Path(scratch) / f"{subject}-{repeat}"
            run = partial(RUNS[subject], folder, script, args)
            runs[subject] += report.attempt(subject, run) or []
    return report.finish(runs, tell(report, runs))


if __name__ == "__main__":
    raise SystemExit(main())
