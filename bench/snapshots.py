"""What snapshots cost: the demo's GPT under FSDP2 on four ranks with a snapshot every ten steps,
and with none, in turn.

A figure is the mean time of a step over one run, the first steps left out: only one step in ten has
a snapshot to pay for, which a median would not show. All runs must end with the same loss.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from bench import rivals, sharded_train
from bench.measure import Facts, Report, each, in_turn, options, pairs, parsed, summary
from bench.steady import RANKS, RUN_S
from tmd import embedded
from tmd.core.values.model import ClusterView
from tmd.demo.cluster import ClusterSpec, LocalCluster, workers

TINY = ("--width", "64", "--depth", "2", "--heads", "4")
EVERY = {"snapshots": 10, "none": 0}
LIMIT = 1.03


def has_snapshot(view: ClusterView, after: int) -> bool:
    """Whether some worker keeps two copies, its own and another's, of a step after ``after``."""
    return any(sum(k.step > after for k in w.kept) >= 2 for w in workers(view))


async def run(
    folder: Path, script: tuple[str, ...], every: int, args: argparse.Namespace
) -> list[rivals.Line]:
    """The trace of an undisturbed run; fails if it should have taken snapshots and has not."""
    with embedded.redis() as redis:
        command = ("-m", sharded_train.__name__, "--snapshots", str(every), *script)
        spec = ClusterSpec(folder, redis.url, "bench", RANKS, (), command)
        async with LocalCluster(spec) as cluster:
            if every:
                await cluster.until(
                    lambda v: has_snapshot(v, args.warm), "a snapshot is taken", RUN_S
                )
            codes = await cluster.finished(RUN_S)
            if any(codes.values()):
                raise RuntimeError(f"exit status by host: {codes}\n{cluster.log(RANKS[0])[-2000:]}")
    return rivals.read(cluster.trace)


def facts(folder: Path, script: tuple[str, ...], every: int, args: argparse.Namespace) -> Facts:
    """The mean step of a run, the largest resident size of rank 0, and the loss it came to."""
    lines = asyncio.run(run(folder, script, every, args))
    counted = [x for x in lines if x["rank"] == 0 and x["step"] >= args.warm]
    seconds = (counted[-1]["at"] - counted[0]["at"]) / (len(counted) - 1)
    rss, loss = counted[-1]["rss_peak"], counted[-1]["loss"]
    return [{"step_s": seconds, "steps": len(counted), "rss_peak": rss, "loss": loss}]


def tell(report: Report, runs: dict[str, Facts]) -> dict[str, Any]:
    """Rows and the target; returns the figures."""
    figures: dict[str, Any] = {name: each(found, "step_s") for name, found in runs.items()}
    for name, step in figures.items():
        report.row(f"{name}: mean step", step)
    compared = pairs(runs["snapshots"], runs["none"])
    by_pair = summary(a["step_s"] / b["step_s"] for a, b in compared)
    report.row("snapshots/none by repeat", by_pair, "a ratio, not seconds")
    memory = summary((a["rss_peak"] - b["rss_peak"]) / 1e6 for a, b in compared)
    report.row("host memory of rank 0, more", memory, "MB, not seconds")
    losses = {f["loss"] for found in runs.values() for f in found}
    if len(losses) > 1:
        raise RuntimeError(f"the last loss of rank 0 differs between the runs: {sorted(losses)}")
    title = f"mean step with a snapshot every 10 steps / without <= {LIMIT}"
    report.target(title, by_pair.get("median"), LIMIT, at_least=False)
    return {**figures, "ratio by repeat": by_pair, "more host memory, MB": memory}


def main() -> int:
    parser = options("snapshots", __doc__)
    parser.add_argument("--steps", type=int, default=71)
    parser.add_argument("--warm", type=int, default=10, help="steps at the start left out")
    args = parsed(parser)
    if args.quick:
        args.repeats, args.steps, args.warm = 1, 31, 5
    report = Report("snapshots", args)
    script = ("--steps", str(args.steps), *(TINY if args.quick else ()))
    runs: dict[str, Facts] = {name: [] for name in EVERY}
    with tempfile.TemporaryDirectory(prefix="tmd-bench-") as scratch:
        for repeat, name in in_turn(args.repeats, tuple(EVERY)):
            report.progress(f"repeat {repeat + 1} of {args.repeats}: {name}")
            one = partial(facts, Path(scratch) / f"{name}-{repeat}", script, EVERY[name], args)
            runs[name] += report.facts(name, repeat, one)
    return report.finish(runs, tell(report, runs))


if __name__ == "__main__":
    raise SystemExit(main())
