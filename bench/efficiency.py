"""What many planned replacements cost: the demo's job with a drain every ten seconds, and the same
job undisturbed, in turn.

All ranks, the joiner and the control plane share this machine's cores, which on a cluster they do
not. So the loss is taken apart by accounting:

``pause``      how long the switches held up the job, summed, as a share of the run's time;
``mirroring``  processor time that leavers spent on mirroring their rank, by threads of their own
               (``beside``) and within the step (``within``), as a share of the run's time;
``joiner``     processor time of workers that wait or shadow, as a share of the run's time.

The efficiency that a cluster would see is 1 - pause - mirroring within the step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench.downtime import PATIENCE_S, RANKS, STANDBY, TINY, drain, run_on
from bench.measure import Facts, Report, each, in_turn, options, pairs, parsed, summary
from tmd import embedded
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.model import Activity
from tmd.demo import story, train
from tmd.demo.cluster import ClusterSpec, LocalCluster, host_of, workers
from tmd.demo.report import events_of, median_step, read_trace
from tmd.demo.story import StoryTimes

EVERY_S = 10.0
SAMPLE_S = 0.2
WARM = 10
TICKS = os.sysconf("SC_CLK_TCK")
HOLDING = frozenset({Activity.TRAINING, Activity.STUCK, Activity.LEFT})
LIMIT = 0.99


class Accounts:
    """Processor seconds of workers, by whether they hold a rank."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._seen: dict[str, float] = {}
        self.holding = self.idle = 0.0

    async def run(self) -> None:
        """Until cancelled. A change of role is seen up to ``SAMPLE_S`` late."""
        while True:
            with contextlib.suppress(StoreUnavailable):
                self._look(workers(await self._cluster.view()))
            await asyncio.sleep(SAMPLE_S)

    def _look(self, statuses: list[Any]) -> None:
        for status in statuses:
            used = _cpu_seconds(status.pid)
            if used is None:
                continue
            spent = used - self._seen.get(status.worker, used)
            self._seen[status.worker] = used
            if status.activity in HOLDING:
                self.holding += spent
            else:
                self.idle += spent


def _cpu_seconds(pid: int) -> float | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def run(folder: Path, script: tuple[str, ...], seconds: float, *, moves: bool) -> Facts:
    """One run of ``seconds``; with ``moves`` a drain every ten of them, rank after rank."""
    story_times = StoryTimes()
    command = (train.__file__, "--steps", "100000", *script)
    with embedded.redis() as redis:
        spec = ClusterSpec(folder, redis.url, "bench", RANKS, STANDBY, command)
        async with LocalCluster(spec) as cluster:
            await run_on(cluster, WARM)
            accounts = Accounts(cluster)
            counting = asyncio.create_task(accounts.run())
            begin = time.time()
            rank = 0
            while (left := begin + seconds - time.time()) > 0:
                due = time.time() + min(EVERY_S, left)
                if moves and left > EVERY_S / 2:
                    await _move(cluster, story_times, rank)
                    rank = (rank + 1) % len(RANKS)
                await asyncio.sleep(max(0.0, due - time.time()))
            end = time.time()
            counting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await counting
        trace = read_trace(cluster.trace)
    lines = [x for x in trace.of_rank(0) if begin <= x["at"] <= end]
    wall, steps = lines[-1]["at"] - lines[0]["at"], len(lines) - 1
    events = events_of(trace, story_times.plans, story_times.started, story_times.seen)
    cpu = [p.timings.get("mirror_within", 0.0) for p in story_times.plans]
    beside = [p.timings.get("mirror_beside", 0.0) for p in story_times.plans]
    return [
        {
            "steps": steps,
            "wall_s": wall,
            "s_per_step": wall / steps,
            "median_step_s": median_step(lines),
            "moves": len(events),
            "how": sorted({p.how for p in story_times.plans}),
            "pause": sum(e.pause_s or 0.0 for e in events) / wall,
            "mirroring_within": sum(cpu) / wall,
            "mirroring_beside": sum(beside) / wall,
            "ranks_cpu": accounts.holding / wall,
            "joiner": accounts.idle / wall,
            "losses": {f"{r}/{s}": line["loss"] for (r, s), line in trace.commits.items()},
        }
    ]


async def _move(cluster: LocalCluster, story_times: StoryTimes, rank: int) -> None:
    view = await cluster.until(
        lambda v: any(w.activity is Activity.STANDBY for w in workers(v)),
        "a standby waits",
        PATIENCE_S,
    )
    host = host_of(view, rank)
    assert host is not None
    await story.event(cluster, story_times, lambda: drain(cluster, host))


def tell(report: Report, runs: dict[str, Facts]) -> dict[str, Any]:
    """Rows and the target; returns the figures."""
    quiet, moved = runs["undisturbed"], runs["moved"]
    figures: dict[str, Any] = {
        "undisturbed s/step": each(quiet, "s_per_step"),
        "moved s/step": each(moved, "s_per_step"),
        **{
            name: each(moved, name)
            for name in ("pause", "mirroring_within", "mirroring_beside", "joiner", "ranks_cpu")
        },
        "standby, undisturbed": each(quiet, "joiner"),
    }
    figures["speed on these cores"] = summary(
        a["s_per_step"] / b["s_per_step"] for a, b in pairs(quiet, moved)
    )
    figures["efficiency"] = summary(
        1.0 - max(0.0, m["pause"]) - m["mirroring_within"] for m in moved
    )
    for name, facts in figures.items():
        report.row(name, facts, "seconds" if name.endswith("step") else "part of the run's time")
    figures["moves"] = sum(m["moves"] for m in moved)
    median = figures["efficiency"].get("median")
    report.target(f"efficiency (pause, mirroring) >= {LIMIT}", median, LIMIT, at_least=True)
    return figures


def compared(runs: dict[str, Facts]) -> int:
    """Losses that were compared bit for bit between all runs.

    Raises:
        RuntimeError: one differs.
    """
    found = [run.pop("losses") for kind in runs.values() for run in kind]
    count = 0
    for other in found[1:]:
        common = found[0].keys() & other.keys()
        wrong = [k for k in common if found[0][k] != other[k]]
        if wrong:
            first = min(wrong, key=lambda k: [int(x) for x in reversed(k.split("/"))])
            raise RuntimeError(f"{len(wrong)} losses differ, first (rank/step) {first}")
        count += len(common)
    return count


def main() -> int:
    parser = options("efficiency", __doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    args = parsed(parser)
    if args.quick:
        args.repeats, args.seconds = 1, 15.0
    report = Report("efficiency", args)
    script = TINY if args.quick else ()
    runs: dict[str, Facts] = {"undisturbed": [], "moved": []}
    with tempfile.TemporaryDirectory(prefix="tmd-bench-") as scratch:
        for repeat, subject in in_turn(args.repeats, ("undisturbed", "moved")):
            report.progress(f"repeat {repeat + 1} of {args.repeats}: {subject}")
            folder = Path(scratch) / f"{subject}-{repeat}"
            one = run(folder, script, args.seconds, moves=subject == "moved")
            runs[subject] += report.facts(subject, repeat, partial(asyncio.run, one))
    losses = compared(runs)
    report.progress(f"losses compared bit for bit: {losses}")
    return report.finish(runs, {**tell(report, runs), "losses compared": losses})


if __name__ == "__main__":
    raise SystemExit(main())
