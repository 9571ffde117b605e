"""What the loss of two of four ranks costs a job that has no standby.

With ``elastic=True`` the two survivors compute for the lost ranks, until their workers are back and
get them again by planned moves. Without it, as is the default, the job holds until both are back.
Both are the demo's job, on four hosts, and take turns. In each run two workers are killed at the
same time, at no particular point of a step. The elastic job goes on like that for some steps; then
one of the two is started again, and after some more steps the other. Those of the other job are
started at once.

``downtime``: from the kills to the first commit after them on all ranks, less one step before them.
``pause of a move back``: between the commits around it, less one step before it.
All processes share the cores of this machine: a step of two workers with two ranks each takes about
as long here as one of four workers, and not twice as long as on hosts of their own.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from bench.downtime import PATIENCE_S, RANKS, TINY, kill, run_on
from bench.measure import Report, commit_times, each, in_turn, options, parsed, summary
from tmd import embedded
from tmd.core.planning.migration import is_live
from tmd.core.values.model import ClusterView, MigrationPlan, Phase, PlanKind
from tmd.demo import train
from tmd.demo.cluster import ClusterSpec, LocalCluster, host_of, workers
from tmd.demo.report import DemoTrace, gap_s, read_trace

SUBJECTS = ("elastic", "holds")
LOST = 2
STEPS = 20
"""Over which a step is measured."""


def trains_with(adopted: int) -> Any:
    """Whether the job trains, with so many ranks adopted."""

    def holds(view: ClusterView) -> bool:
        job = view.jobs[0]
        return not is_live(job.plan) and len(job.membership.adopted) == adopted

    return holds


async def steps_on(cluster: LocalCluster, steps: int) -> None:
    """Wait for ``steps`` more steps, with as many workers as there are."""
    goal = max(w.step for w in workers(await cluster.view())) + steps
    await cluster.until(
        lambda v: max(w.step for w in workers(v)) >= goal, f"step {goal}", PATIENCE_S
    )


async def kill_two(cluster: LocalCluster) -> tuple[list[str], float]:
    """Kill the workers of two ranks at once; their hosts, and when."""
    view = await cluster.view()
    await asyncio.sleep(random.uniform(0, max(w.step_seconds for w in workers(view))))
    lost = [host_of(view, rank) for rank in random.sample(range(len(RANKS)), LOST)]
    found = [host for host in lost if host is not None]
    assert len(found) == LOST
    since = time.time()
    for host in found:
        await kill(cluster, host)
    return [host.host for host in found], since


async def disturbed(
    cluster: LocalCluster, elastic: bool, quiet: int
) -> tuple[float, tuple[MigrationPlan, ...]]:
    """Kill two workers, and start them again; when they died, and the plans of the job."""
    await run_on(cluster, quiet)
    hosts, since = await kill_two(cluster)
    for lacking, host in zip((2, 1), hosts, strict=True):
        if elastic:
            await cluster.until(trains_with(lacking), "the others go on", PATIENCE_S)
            await steps_on(cluster, quiet)
        await cluster.launchers[host].wait()
        await cluster.start_launcher(host)
    await run_on(cluster, quiet)
    view = await cluster.until(trains_with(0), "all ranks have workers", PATIENCE_S)
    return since, view.jobs[0].history


def facts(
    trace: DemoTrace, plans: tuple[MigrationPlan, ...], since: float, elastic: bool
) -> dict[str, Any]:
    """The figures of one run."""
    done = [plan for plan in plans if plan.phase is Phase.DONE]
    back = [plan for plan in done if plan.kind is PlanKind.PLANNED]
    lines = trace.commits.values()
    first_epoch = min(line["epoch"] for line in lines)
    before = [line for line in lines if line["epoch"] == first_epoch]
    last = max(line["step"] for line in before)
    after = commit_times(line for line in lines if line["step"] > last)
    full_s = usual_step(before)
    found: dict[str, Any] = {
        "downtime_s": after[0] - since - full_s,
        "step_s": full_s,
        "plans": [plan.id for plan in done],
    }
    if not elastic:
        return found
    if len(back) != LOST:
        raise RuntimeError(f"{LOST} moves back were expected: {[plan.id for plan in done]}")
    found["step_of_two_s"] = usual_before(lines, back[0])
    found["pauses_s"] = [gap_s(trace, plan) - usual_before(lines, plan) for plan in back]
    return found


def usual_step(lines: Iterable[dict[str, Any]]) -> float:
    """The median of the last steps."""
    return median(b - a for a, b in pairwise(commit_times(lines)[-STEPS:]))


def usual_before(lines: Iterable[dict[str, Any]], plan: MigrationPlan) -> float:
    """The median step in the epoch that ``plan`` ends."""
    return usual_step(line for line in lines if line["epoch"] == plan.old.epoch)


def run(folder: Path, script: tuple[str, ...], quiet: int, subject: str) -> dict[str, Any]:
    """One run of ``subject``.

    Raises:
        TimeoutError: the job did not get back to four workers.
    """
    elastic = subject == "elastic"
    command = (train.__file__, "--steps", "100000", *script, *(["--elastic"] if elastic else []))
    with embedded.redis() as redis:
        spec = ClusterSpec(folder, redis.url, "bench", RANKS, (), command)

        async def act() -> tuple[float, tuple[MigrationPlan, ...]]:
            async with LocalCluster(spec) as cluster:
                return await disturbed(cluster, elastic, quiet)

        since, plans = asyncio.run(act())
    return facts(read_trace(folder / "trace"), plans, since, elastic)


def tell(report: Report, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Rows and targets; returns the figures."""
    elastic, holds = (runs[subject] for subject in SUBJECTS)
    figures: dict[str, Any] = {
        "elastic: downtime after two kills": each(elastic, "downtime_s"),
        "elastic: pause of a move back": summary(s for one in elastic for s in one["pauses_s"]),
        "holds: downtime after two kills": each(holds, "downtime_s"),
        "elastic: step of four workers": each(elastic, "step_s"),
        "elastic: step of two workers": each(elastic, "step_of_two_s"),
    }
    for name, value in figures.items():
        report.row(name, value, "beyond one step" if "step of" not in name else "")
    down = figures["elastic: downtime after two kills"].get("median")
    pause = figures["elastic: pause of a move back"].get("median")
    report.target("downtime <= 1 s", down, 1.0, at_least=False)
    report.target("pause of a move back <= 0.05 s", pause, 0.05, at_least=False)
    return figures


def main() -> int:
    parser = options("elastic", __doc__)
    parser.add_argument("--quiet", type=int, default=STEPS, help="steps before and after an event")
    args = parsed(parser)
    if args.quick:
        args.repeats, args.quiet = 1, 5
    report = Report("elastic", args)
    script = TINY if args.quick else ()
    runs: dict[str, list[dict[str, Any]]] = {subject: [] for subject in SUBJECTS}
    with tempfile.TemporaryDirectory(prefix="tmd-bench-") as scratch:
        for repeat, subject in in_turn(args.repeats, SUBJECTS):
            report.progress(f"repeat {repeat + 1} of {args.repeats}: {subject}")
            folder = Path(scratch) / f"{subject}-{repeat}"
            one = report.attempt(subject, partial(run, folder, script, args.quiet, subject))
            runs[subject] += [] if one is None else [one]
    return report.finish(runs, tell(report, runs))


if __name__ == "__main__":
    raise SystemExit(main())
