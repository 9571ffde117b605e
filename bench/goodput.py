"""Whether ``tmd simulate`` predicts what a real job does: the goodput of a job whose workers are
killed and whose hosts are drained at random times, beside the simulated one.

Two runs of a job with four ranks and one standby in each repeat. The first measures what
each event costs: kills and drains, one at a time. The second plays a trace of kills and drains at
random times, so that losses meet a job without a standby, which holds. The simulation gets the
costs of the first run and the trace of the second, and nothing else of it but its undisturbed step.

``goodput``: committed steps times the mean undisturbed step, over the time. The cost of an event is
the time that is lost in the few steps around it. Launchers restart joined workers at once. By
default the pause doubles with each consecutive failure, which are rare in real jobs. The steps of
the job consist mostly of waiting. On two cores a worker that starts would otherwise slow down those
that train by a third for some six seconds, which the simulation does not know, and which does not
happen where each worker has a GPU and cores of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import tempfile
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from bench import waiting_train
from bench.downtime import PATIENCE_S, RANKS, STANDBY, TINY, run_on
from bench.measure import Report, commit_times, options, parsed, summary
from tmd import embedded
from tmd.config import Settings
from tmd.core.values.model import ClusterView, MigrationPlan, Phase, PlanKind
from tmd.demo.cluster import ClusterSpec, LocalCluster, host_of, ready, workers
from tmd.demo.report import DemoTrace, read_trace
from tmd.simulate import compare, costs
from tmd.simulate.costs import Costs
from tmd.simulate.values import (
    HOUR,
    Fault,
    FaultScope,
    Job,
    Outcome,
    RecoveryMethod,
    RecoverySetup,
    Warned,
)

NOTICE_S = 30.0
"""From a drain to the end of the maintenance: the drain is withdrawn then."""
CALM_S = 4.0
"""Time after an event in which steps still count as disturbed."""
AROUND = 4
"""Steps around an event in which it costs something."""
LIMIT = 0.05
BACK_AT_ONCE_S = 1e-3


class Commits:
    """When the last rank committed each step."""

    def __init__(self, trace: DemoTrace) -> None:
        self.at = commit_times(trace.commits.values())

    def within(self, begin: float, end: float) -> int:
        """Steps committed in this time."""
        return bisect_right(self.at, end) - bisect_right(self.at, begin)

    def step_s(self, disturbed: Sequence[tuple[float, float]], begin: float, end: float) -> float:
        """The mean step between ``begin`` and ``end`` outside of the ``disturbed`` times."""
        gaps = [
            later - earlier
            for earlier, later in pairwise(self.at)
            if begin <= earlier
            and later <= end
            and not any(earlier < over and later > since for since, over in disturbed)
        ]
        return fmean(gaps)

    def lost(self, since: float, step_s: float) -> float:
        """Time lost in the step in which something happened at ``since``, and in the next few."""
        begin = bisect_right(self.at, since) - 1
        end = bisect_left(self.at, since + AROUND * step_s)
        return self.at[end] - self.at[begin] - (end - begin) * step_s

    def done(self, since: float) -> float:
        """Time since the last commit before ``since``: the simulation counts this part of the
        interrupted step itself."""
        return since - self.at[bisect_right(self.at, since) - 1]


class Event(NamedTuple):
    """Something that was done to the job, in wall-clock time."""

    rank: int
    drain: bool
    since: float
    over: float
    prepared_s: float = 0.0


def killed(view: ClusterView, rank: int) -> bool:
    """Kill the worker that holds ``rank``, if one trains."""
    host = host_of(view, rank)
    found = next((w for w in workers(view) if w.rank == rank and host is not None), None)
    if found is None:
        return False
    try:
        os.kill(found.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False  # the view is older than the last kill
    return True


async def settled(cluster: LocalCluster) -> ClusterView:
    """Wait until all ranks train and the standby waits."""
    return await cluster.until(
        lambda v: ready(v, len(RANKS), len(STANDBY)), "all are back", PATIENCE_S
    )


def drains_of(view: ClusterView) -> list[MigrationPlan]:
    """The planned moves that have ended, in order."""
    history = view.jobs[0].history if view.jobs else ()
    return [plan for plan in history if plan.kind is PlanKind.PLANNED]


async def moved(cluster: LocalCluster, rank: int) -> tuple[str, float]:
    """Drain the host of ``rank``; the host, and the time until the vote switched."""
    view = await cluster.view()
    host = host_of(view, rank)
    assert host is not None
    begin, before = time.time(), {plan.id for plan in drains_of(view)}

    def ended(view: ClusterView) -> list[MigrationPlan]:
        return [plan for plan in drains_of(view) if plan.id not in before]

    await cluster.drain(host.host)
    view = await cluster.until(lambda v: bool(ended(v)), "the drain is done", PATIENCE_S)
    plan = ended(view)[0]
    if plan.phase is not Phase.DONE:
        raise RuntimeError(f"the drain was {plan.phase}: {plan.outcome}")
    switched = next((m.at for m in plan.timeline if m.phase is Phase.SWITCH), time.time())
    return host.host, switched - begin


# --- what an event costs --------------------------------------------------------------------------


async def calibrated(cluster: LocalCluster, args: argparse.Namespace) -> list[Event]:
    """Kills and drains, one at a time."""
    found = []
    for number in range(2 * args.events):
        rank = 1 + number % (len(RANKS) - 1)
        view = await run_on(cluster, args.quiet)
        since = time.time() + random.uniform(0, max(w.step_seconds for w in workers(view)))
        await asyncio.sleep(since - time.time())
        if number % 2:
            host, prepared_s = await moved(cluster, rank)
            await cluster.undrain(host)
            await settled(cluster)
            found.append(Event(rank, True, since, time.time(), prepared_s))
        else:
            assert killed(await cluster.view(), rank)
            since = time.time()
            await run_on(cluster, 1)
            found.append(Event(rank, False, since, time.time()))
    await run_on(cluster, args.quiet)
    return found


def costs_of(commits: Commits, events: Sequence[Event]) -> tuple[Costs, dict[str, list[float]]]:
    """What each event cost, and the means as the costs of a simulation."""
    disturbed = [(e.since, e.over + CALM_S) for e in events]
    step_s = commits.step_s(disturbed, events[0].since - 10 * CALM_S, commits.at[-1])
    each = {
        "warm_s": [
            commits.lost(e.since, step_s) - commits.done(e.since) for e in events if not e.drain
        ],
        "move_s": [commits.lost(e.since + e.prepared_s, step_s) for e in events if e.drain],
        "prepare_s": [e.prepared_s for e in events if e.drain],
        "rejoin_s": [e.over - e.since for e in events if not e.drain],
    }
    measured = {name: max(0.0, fmean(values)) for name, values in each.items()}
    base = costs.shipped()["bench"]
    return costs.changed(base, {"step_s": step_s, **measured}, "measured").costs, each


# --- a trace at random ----------------------------------------------------------------------------


async def disturbed(cluster: LocalCluster, args: argparse.Namespace) -> tuple[float, list[Event]]:
    """Play events at random times for a while; when that began, and what was done."""
    chance = random.Random(args.seed)
    await run_on(cluster, args.quiet)
    begin, found = time.time(), []
    at = chance.expovariate(1 / args.every_s)
    while at < args.window_s - NOTICE_S:
        rank, drains = chance.randrange(len(RANKS)), chance.random() < args.drains
        await asyncio.sleep(max(0.0, begin + at - time.time()))
        view, since = await cluster.view(), time.time()
        host = host_of(view, rank)
        if drains and host is not None and ready(view, len(RANKS), len(STANDBY)):
            await moved(cluster, rank)
            await asyncio.sleep(max(0.0, since + NOTICE_S - time.time()))
            await cluster.undrain(host.host)
            found.append(Event(rank, True, since, time.time()))
        elif not drains and killed(view, rank):
            found.append(Event(rank, False, since, since))
        at = max(at, time.time() - begin) + chance.expovariate(1 / args.every_s)
    await asyncio.sleep(max(0.0, begin + args.window_s - time.time()))
    await settled(cluster)
    await run_on(cluster, args.quiet)
    return begin, found


def trace_of(events: Sequence[Event], begin: float) -> tuple[Fault, ...]:
    """The same events for the simulation."""
    return tuple(
        Fault(
            at_s=e.since - begin + NOTICE_S,
            place=e.rank,
            component="drain",
            repair_s=BACK_AT_ONCE_S,
            warned=Warned.DRAIN,
            notice_s=NOTICE_S,
        )
        if e.drain
        else Fault(e.since - begin, e.rank, "kill", FaultScope.WORKER)
        for e in events
    )


def predicted(known: Costs, trace: Sequence[Fault], window_s: float) -> Outcome:
    """The outcome that the simulation expects."""
    job = Job(len(RANKS), hours=window_s / HOUR)
    rules = compare.rules_of(Settings(), announced=False)
    return compare.outcome(
        compare.Study(job, known, rules, 0.0, 0),
        trace,
        RecoverySetup(RecoveryMethod.WARM, len(STANDBY)),
    )


# --- runs -----------------------------------------------------------------------------------------


async def running(folder: Path, args: argparse.Namespace, act: Any) -> tuple[Commits, Any]:
    """One run of the job with ``act``; its commits, and what was done."""
    script = ("-m", waiting_train.__name__, "--steps", "100000", *TINY)
    with embedded.redis() as redis:
        spec = ClusterSpec(
            *(folder, redis.url, "bench", RANKS, STANDBY, script),
            max_restarts=99,
            restart_delay_s=0.0,
        )
        async with LocalCluster(spec) as cluster:
            done = await act(cluster, args)
        return Commits(read_trace(cluster.trace)), done


def repeat(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Both runs, and the prediction."""
    commits, events = asyncio.run(running(folder / "costs", args, calibrated))
    known, each = costs_of(commits, events)
    commits, (begin, played) = asyncio.run(running(folder / "trace", args, disturbed))
    end = begin + args.window_s
    # A kill disturbs until its worker stands by again.
    away = [(e.since, e.over + CALM_S + (0.0 if e.drain else known.rejoin_s)) for e in played]
    step_s = commits.step_s(away, begin - 10 * CALM_S, commits.at[-1])
    known = msgspec.structs.replace(known, step_s=step_s)
    trace = trace_of(played, begin)
    outcome = predicted(known, trace, args.window_s)
    measured = commits.within(begin, end) * step_s / args.window_s
    return {
        "measured": measured,
        "predicted": outcome.goodput,
        "difference": abs(outcome.goodput - measured) / measured,
        "lost_measured": 1.0 - measured,
        "lost_predicted": 1.0 - outcome.goodput,
        "steps": commits.within(begin, end),
        "predicted_lost_s": {cause: hours * HOUR for cause, hours in outcome.lost.items()},
        "kills": sum(not e.drain for e in played),
        "drains": sum(e.drain for e in played),
        "costs": msgspec.to_builtins(known),
        "each": each,
        "trace": msgspec.to_builtins(trace),
    }


def tell(report: Report, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows and the target; returns the figures."""
    shares = ("measured", "predicted", "difference", "lost_measured", "lost_predicted")
    names = (*shares, "kills", "drains")
    figures: dict[str, Any] = {name: summary(r[name] for r in runs) for name in names}
    for name in shares:
        report.row(f"goodput: {name}", figures[name], "a share, not seconds")
    for name in ("step_s", "warm_s", "move_s", "rejoin_s"):
        figures[name] = summary(r["costs"][name] for r in runs)
        report.row(f"cost {name}", figures[name])
    most = figures["difference"].get("max")
    title = "greatest difference of predicted and measured goodput"
    report.target(f"{title} <= {LIMIT}", most, LIMIT, at_least=False)
    return figures


def main() -> int:
    parser = options("goodput", __doc__, repeats=5)
    parser.add_argument(
        "--events", type=int, default=6, help="kills, and as many drains, for the costs"
    )
    parser.add_argument("--quiet", type=int, default=20, help="steps between two of them")
    parser.add_argument("--window-s", type=float, default=120.0, help="length of the trace")
    parser.add_argument("--every-s", type=float, default=4.0, help="mean time between events")
    parser.add_argument("--drains", type=float, default=0.15, help="share of drains")
    parser.add_argument("--seed", type=int, default=1, help="of the first trace; a repeat adds 1")
    args = parsed(parser)
    if args.quick:
        args.repeats, args.events, args.quiet, args.window_s = 1, 1, 10, 60.0
    report = Report("goodput", args)
    runs = []
    with tempfile.TemporaryDirectory(prefix="tmd-bench-") as scratch:
        for number in range(args.repeats):
            report.progress(f"repeat {number + 1} of {args.repeats}")
            once = argparse.Namespace(**{**vars(args), "seed": args.seed + number})
            found = report.attempt("goodput", partial(repeat, Path(scratch) / str(number), once))
            runs += [] if found is None else [found]
    return report.finish(runs, tell(report, runs))


if __name__ == "__main__":
    raise SystemExit(main())
