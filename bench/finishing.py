"""What it costs in an undisturbed step that a broken step could be finished.

A hot standby follows one of four ranks. Every ``--quiet`` steps the ranks begin, or cease, to keep
what it takes to finish a broken step, so that both kinds of steps are of the same processes. The
figure is the ratio of the median steps of two adjacent blocks. Each host has its own share of the
cores (``bench.shares``). This needs root.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from bench import finishing_train
from bench.downtime import PATIENCE_S, RANKS, STANDBY, STEP_S
from bench.finishing_train import prepares
from bench.hot import at_work
from bench.measure import Facts, Report, each, interval, summary
from bench.shares import CoreShares, unable
from bench.sizes import Comparison, Runs, Subject, compare, disturbed
from tmd.demo.cluster import LocalCluster, workers
from tmd.demo.report import DemoTrace
from tmd.demo.story import StoryTimes

PROGRAM = ("-m", finishing_train.__name__)
BORDER = 2
"""Steps at the start of a block that do not count: the ranks may not all have changed yet."""
LIMIT = 1.01


async def alternated(subject: Subject) -> Facts:
    """One run with ``--events`` pairs of blocks."""
    args, block = subject.args, subject.args.quiet
    kept = subject.folder / "kept"
    kept.mkdir(parents=True)
    first = 0

    async def look_on(cluster: LocalCluster, _: StoryTimes) -> None:
        nonlocal first
        for launcher in cluster.launchers.values():
            shares.give(launcher.pid)
        view = await cluster.until(lambda v: at_work(v, 1, hot=True), "hot standby", PATIENCE_S)
        # The first whole pair begins where the number of the block is even.
        first = 2 * (max(w.step for w in workers(view)) // (2 * block) + 1)
        goal = (first + 2 * args.events) * block + 1
        await cluster.until(
            lambda v: at_work(v, goal, hot=True), f"step {goal}", PATIENCE_S + STEP_S * goal
        )

    script = (*subject.script, "--block", str(block), "--kept", str(kept))
    with CoreShares(len(RANKS) + len(STANDBY)) as shares:
        trace, _ = await disturbed(subject._replace(script=script), look_on, program=PROGRAM)
    blocks = range(first, first + 2 * args.events)
    for rank in trace.ranks:
        confirm(kept / f"{rank}.jsonl", blocks, block)
    return [pair(trace, number, block) for number in blocks[::2]]


def confirm(file: Path, blocks: range, block: int) -> None:
    """Check by ``file`` of a rank that it kept something in the right blocks only.

    Raises:
        RuntimeError: it did not.
    """
    kept = {line["step"]: line["kept"] for line in map(json.loads, file.read_text().splitlines())}
    counted = [n * block + i for n in blocks for i in range(BORDER, block)]
    wrong = [step for step in counted if (kept[step] > 0) != prepares(step, block)]
    if wrong:
        raise RuntimeError(f"{file.name}: steps {wrong} of {counted} kept {kept}")


def pair(trace: DemoTrace, first: int, block: int) -> dict[str, Any]:
    """The median steps of block ``first`` and the next one."""
    found = {
        prepares(number * block, block): median_step(trace, number * block, block)
        for number in (first, first + 1)
    }
    return {
        "finished_s": found[True],
        "repeated_s": found[False],
        "ratio": found[True] / found[False],
    }


def median_step(trace: DemoTrace, begin: int, block: int) -> float:
    """The median seconds between two steps of a block, each committed by the slowest rank."""
    ends = [
        max(trace.commits[rank, step]["at"] for rank in trace.ranks)
        for step in range(begin + BORDER - 1, begin + block)
    ]
    return statistics.median(b - a for a, b in itertools.pairwise(ends))


def tell(report: Report, runs: Runs, _: argparse.Namespace) -> dict[str, Any]:
    """Report rows and targets; return the figures."""
    figures: dict[str, Any] = {}
    for name, found in runs.items():
        size = name.split()[1]
        for key, what in (("finished_s", "could be finished"), ("repeated_s", "could not")):
            report.row(f"{size}: step that {what}", each(found, key))
        ratios = [fact["ratio"] for fact in found]
        shown = summary(ratios)
        between = interval(ratios)
        report.row(f"{size}: ratio", shown, f"95 % of the median: {between}")
        title = f"{size}: ratio of steps <= {LIMIT}"
        report.target(title, shown.get("median"), LIMIT, at_least=False)
        figures[size] = {
            "finished_s": each(found, "finished_s"),
            "repeated_s": each(found, "repeated_s"),
            "ratio": {**shown, "interval_95": between},
        }
    return figures


WAYS = {"hot": "hot = 1\n"}


def main() -> int:
    what = "pairs of blocks"
    return compare(Comparison("finishing", __doc__, WAYS, what, 10, alternated, tell, unable))


if __name__ == "__main__":
    raise SystemExit(main())
