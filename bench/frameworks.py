"""What the adapters cost when nothing happens: the ``Trainer`` of transformers and of Lightning,
two ranks, under tmd (daemons beside it) and as their users run it, on Gloo under torchrun, in turn.

A figure is the median time between two steps of rank 0 over one run, the first steps left out.
"""

from __future__ import annotations

import asyncio
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from bench import frameworks_train, rivals
from bench.measure import Facts, Report, in_turn, options, paired, parsed
from tmd import embedded
from tmd.demo.cluster import ClusterSpec, LocalCluster

HOSTS = ("host-1", "host-2")
FRAMEWORKS = ("transformers", "lightning")
TINY = ("--width", "32", "--depth", "1")
LIMIT = 1.02
RUN_S = 300.0


def under_tmd(folder: Path, script: tuple[str, ...], warm: int) -> Facts:
    """An undisturbed run with the control plane up."""
    folder.mkdir(parents=True)
    asyncio.run(undisturbed(folder, ("--side", "tmd", "--trace", str(folder / "steps"), *script)))
    return facts(folder / "steps", warm)


async def undisturbed(folder: Path, script: tuple[str, ...]) -> None:
    """Run the script on all hosts, without a standby."""
    with embedded.redis() as redis:
        command = (frameworks_train.__file__, *script)
        spec = ClusterSpec(folder, redis.url, "bench", HOSTS, (), command)
        async with LocalCluster(spec) as cluster:
            codes = await cluster.finished(RUN_S)
            if any(codes.values()):
                raise RuntimeError(f"exit status by host: {codes}\n{cluster.log(HOSTS[0])[-2000:]}")


def under_gloo(folder: Path, script: tuple[str, ...], warm: int) -> Facts:
    """The same steps without tmd."""
    own = ("--side", "gloo", *script)
    rivals.torchrun(own, len(HOSTS), folder, RUN_S, module="bench.frameworks_train")
    return facts(folder / "trace", warm)


def facts(trace: Path, warm: int) -> Facts:
    """The median step of a run."""
    counted = [line for line in rivals.read(trace) if line["step"] >= warm]
    return [{"step_s": rivals.step_seconds(counted), "steps": len(counted)}]


def tell(report: Report, runs: dict[str, Facts], framework: str) -> dict[str, Any]:
    """Rows and the target of one framework; returns the figures."""
    figures = paired(runs[f"{framework} tmd"], runs[f"{framework} gloo"])
    report.row(f"{framework} on tmd: step", figures["tmd"], "adapter, session, vote, tmd backend")
    report.row(f"{framework} on Gloo: step", figures["gloo"], "its own DDP under torchrun")
    by_repeat = figures["ratio by repeat"]
    report.row(f"{framework}: tmd/Gloo by repeat", by_repeat, "a ratio, not seconds")
    ratio = figures["ratio of medians"]
    report.target(f"step of {framework} on tmd / on Gloo <= {LIMIT}", ratio, LIMIT, at_least=False)
    return figures


RUNS = {"tmd": under_tmd, "gloo": under_gloo}


def main() -> int:
    parser = options("frameworks", __doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm", type=int, default=5, help="steps at the start that do not count")
    args = parsed(parser)
    if args.quick:
        args.repeats, args.steps = 1, 10
    report = Report("frameworks", args)
    subjects = [f"{framework} {side}" for framework in FRAMEWORKS for side in RUNS]
    runs: dict[str, Facts] = {subject: [] for subject in subjects}
    with tempfile.TemporaryDirectory(prefix="tmd-bench-") as scratch:
        for repeat, subject in in_turn(args.repeats, subjects):
            report.progress(f"repeat {repeat + 1} of {args.repeats}: {subject}")
            framework, side = subject.split()
            size = TINY if args.quick else ()
            script = ("--framework", framework, "--steps", str(args.steps), *size)
            folder = Path(scratch) / f"{framework}-{side}-{repeat}"
            run = partial(RUNS[side], folder, script, args.warm)
            runs[subject] += report.facts(subject, repeat, run)
    figures = {framework: tell(report, runs, framework) for framework in FRAMEWORKS}
    return report.finish(runs, figures)


if __name__ == "__main__":
    raise SystemExit(main())
