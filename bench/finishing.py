"""What it costs in an undisturbed step that a broken step could be finished.

A hot standby follows one of four ranks. Every ``--quiet`` steps the ranks begin, or cease, to keep
what it takes to finish a broken step, so that both kinds of steps are of the same processes. The
figures are ratios of two adjacent blocks: of the median steps, and of the time of the processor
that the ranks take, which other machines disturb less. Each host has its own share of the cores
(``bench.shares``). This needs root.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Mapping
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
    notes = subject.folder / "notes"
    notes.mkdir(parents=True)
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

    script = (*subject.script, "--block", str(block), "--notes", str(notes))
    with CoreShares(len(RANKS) + len(STANDBY)) as shares:
        trace, _ = await disturbed(subject._replace(script=script), look_on, program=PROGRAM)
    blocks = range(first, first + 2 * args.events)
    cpu_s = {rank: noted(notes / f"{rank}.jsonl", blocks, block) for rank in trace.ranks}
    return [pair(trace, cpu_s, number, block) for number in blocks[::2]]


def noted(file: Path, blocks: range, block: int) -> dict[int, float]:
    """From ``file`` of a rank, the time of the processor that it had taken by each step.

    Raises:
        RuntimeError: it did not prepare in the right blocks, and in these only.
    """
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    prepared = {line["step"]: line["prepared"] for line in lines}
    counted = [n * block + i for n in blocks for i in range(BORDER, block)]
    wrong = [step for step in counted if prepared[step] != prepares(step, block)]
    if wrong:
        raise RuntimeError(
            f"{file.name}: {len(wrong)} of {len(counted)} steps could be finished in a block "
            f"without preparation, or could not in one with it; the first is step {wrong[0]}"
        )
    return {line["step"]: line["cpu_s"] for line in lines}


def pair(
    trace: DemoTrace, cpu_s: Mapping[int, Mapping[int, float]], first: int, block: int
) -> dict[str, Any]:
    """The median steps of block ``first`` and the next one, and what each took of the processor."""
    steps, taken = {}, {}
    for number in (first, first + 1):
        begin, kind = number * block, prepares(number * block, block)
        steps[kind] = median_step(trace, begin, block)
        last = begin + block - 1
        taken[kind] = sum(each[last] - each[begin + BORDER - 1] for each in cpu_s.values())
    return {
        "finished_s": steps[True],
        "repeated_s": steps[False],
        "ratio": steps[True] / steps[False],
        "cpu_ratio": taken[True] / taken[False],
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
        figures[size] = {key: each(found, key) for key in ("finished_s", "repeated_s")}
        for key, what in (("ratio", "steps"), ("cpu_ratio", "time of the processor")):
            ratios = [fact[key] for fact in found]
            shown, between = summary(ratios), interval(ratios)
            report.row(f"{size}: ratio of {what}", shown, f"95 % of the median: {between}")
            title = f"{size}: ratio of {what} <= {LIMIT}"
            report.target(title, shown.get("median"), LIMIT, at_least=False)
            figures[size][key] = {**shown, "interval_95": between}
    return figures


WAYS = {"hot": "hot = 1\n"}


def main() -> int:
    what = "pairs of blocks"
    return compare(Comparison("finishing", __doc__, WAYS, what, 10, alternated, tell, unable))


if __name__ == "__main__":
    raise SystemExit(main())
