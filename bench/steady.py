"""What tmd costs when nothing happens: the demo's job with four ranks under tmd (session, vote, tmd
backend, daemons beside it) and as plain DDP on Gloo under torchrun, in turn.

A figure is the median time between two commits of rank 0 over one run, the first steps left out.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from bench import rivals
from bench.measure import Facts, Report, each, in_turn, options, paired, parsed
from tmd import embedded
from tmd.demo import train
from tmd.demo.cluster import ClusterSpec, LocalCluster

RANKS = ("host-1", "host-2", "host-3", "host-4")
TINY = ("--width", "64", "--depth", "2", "--heads", "4")
LIMIT = 1.01
RUN_S = 300.0


def under_tmd(folder: Path, script: tuple[str, ...], args: argparse.Namespace) -> Facts:
    """An undisturbed run with the control plane up."""
    return facts(asyncio.run(undisturbed(folder, script)), args)


async def undisturbed(folder: Path, script: tuple[str, ...]) -> list[rivals.Line]:
    """The trace of a run without a standby: here it would only take turns on the same cores."""
    with embedded.redis() as redis:
        command = (train.__file__, *script)
        spec = ClusterSpec(folder, redis.url, "bench", RANKS, (), command)
        async with LocalCluster(spec) as cluster:
            codes = await cluster.finished(RUN_S)
            if any(codes.values()):
                raise RuntimeError(f"exit status by host: {codes}\n{cluster.log(RANKS[0])[-2000:]}")
    return rivals.read(cluster.trace)


def under_gloo(folder: Path, script: tuple[str, ...], args: argparse.Namespace) -> Facts:
    """The same steps without tmd."""
    return facts(rivals.torchrun(script, len(RANKS), folder, RUN_S), args)


def facts(lines: list[rivals.Line], args: argparse.Namespace) -> Facts:
    """The median step of a run, and the loss it came to, to see that both did the same work."""
    counted = [x for x in lines if x["rank"] == 0 and x["step"] >= args.warm]
    loss = float.fromhex(counted[-1]["loss"])
    return [{"step_s": rivals.step_seconds(counted), "steps": len(counted), "loss": loss}]


def tell(report: Report, runs: dict[str, Facts]) -> dict[str, Any]:
    """Rows and the target; returns the figures."""
    figures = paired(runs["tmd"], runs["gloo"])
    report.row("tmd: step", figures["tmd"], "session, vote, tmd backend")
    report.row("gloo: step", figures["gloo"], "plain DDP under torchrun")
    report.row("tmd/gloo by repeat", figures["ratio by repeat"], "a ratio, not seconds")
    losses = {name: each(found, "loss").get("median") for name, found in runs.items()}
    report.progress(f"last loss of rank 0: {losses}")
    ratio = figures["ratio of medians"]
    report.target(f"step of tmd / gloo <= {LIMIT}", ratio, LIMIT, at_least=False)
    return figures


RUNS = {"tmd": under_tmd, "gloo": under_gloo}


def main() -> int:
    parser = options("steady", __doc__)
    parser.add_argument("--steps", type=int, default=35)
    parser.add_argument("--warm", type=int, default=5, help="steps at the start that do not count")
    args = parsed(parser)
    if args.quick:
        args.repeats, args.steps = 1, 10
    report = Report("steady", args)
    script = ("--steps", str(args.steps), *(TINY if args.quick else ()))
    runs: dict[str, Facts] = {"tmd": [], "gloo": []}
    with tempfile.TemporaryDirectory(prefix="tmd-bench-") as scratch:
        for repeat, subject in in_turn(args.repeats, ("tmd", "gloo")):
            report.progress(f"repeat {repeat + 1} of {args.repeats}: {subject}")
            folder = Path(scratch) / f"{subject}-{repeat}"
            one = partial(RUNS[subject], folder, script, args)
            runs[subject] += report.facts(subject, repeat, one)
    return report.finish(runs, tell(report, runs))


if __name__ == "__main__":
    raise SystemExit(main())
