"""What a rank that stays does for a planned move of another one, in jobs of 4 to 32 ranks.

Each rank is a process with a fabric of its own, forked from one that has imported torch. There are
no daemons, no session and no model, so that many of them fit on a small machine. Each rank is in
three groups: the world, its pair (ranks 2k and 2k+1), and all ranks at the same position in their
pairs. Some collectives in each group, and a vote, open all links of a step. Then a standby opens
the links of the middle rank. The others receive and decode the order to arm, check before the vote
that they are ready, switch, and run the collectives again.

For each rank that stays: the links opened from the beginning of the preparation to the end of the
first collectives after the switch, the bytes that they carried until the switch (the handshakes),
the bytes of the order, and seconds of CPU of the process for the preparation and for the switch.
CPU and not wall-clock, since all processes share the machine's cores. The CPU that it takes to
receive as many messages of this benchmark and do nothing is measured in the same run and subtracted
from the preparation. The order names all ranks and grows with them. Nothing else may grow.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import stayers
from bench.measure import Facts, Report, in_turn, median_of, options, parsed, summary
from tests.fabric.pool import Pool, pool
from tmd import wire
from tmd.core.planning.directives import Arm
from tmd.core.values.model import Member, Membership, Move

SIZES = (4, 8, 16, 32)
GROUPS = 4
"""Groups in which a rank has links: three of the script, and that of the vote."""
FLAT = 1.5
"""A stayer's CPU in the largest job may be so many times that in the smallest."""
SCALES = {"preparation_s": 1e3, "switch_s": 1e3}
WORDS = {
    "links": "links opened",
    "handshake_bytes": "bytes of handshakes",
    "preparation_s": "preparation, ms of CPU",
    "switch_s": "switch, ms of CPU",
}


def once(processes: Pool, size: int) -> Facts:
    """One move in a job of ``size`` ranks; the facts of each stayer."""
    everybody: list[Member] = processes.run(stayers.begin)
    leaving, joiner = size // 2, everybody[-1]
    now = Membership(epoch=1, members=tuple(everybody[:size]))
    later = now.replaced({leaving: joiner}, 2)
    move = Move(rank=leaving, leaver=now.members[leaving], joiner=joiner)
    order = wire.encode(wire.DirectiveOrder(1, 1, Arm("bench-2", later, (move,))))
    processes.run(stayers.enter, now, leaving)
    before = processes.run(stayers.step)
    # The second time counts: the first one also pays for imports and caches.
    for _ in range(2):
        marks = [processes.run(stayers.mark)]
        processes.run(stayers.idle, order, leaving)
        processes.run(stayers.idle, order)
        marks.append(processes.run(stayers.mark))
    opened = processes.run(stayers.prepare, order, leaving)[-1]
    processes.run(stayers.arm, order)
    marks.append(processes.run(stayers.mark))
    switched = processes.run(stayers.switch, order)
    after = processes.run(stayers.step)
    marks.append(processes.run(stayers.mark))
    processes.run(stayers.end)
    _same_numbers(before, after, leaving, size)
    return [
        {
            "rank": rank,
            "links": marks[3][rank].opened - marks[1][rank].opened,
            "handshake_bytes": switched[rank][1],
            "preparation_s": _spent(marks, 1, rank) - _spent(marks, 0, rank),
            "switch_s": switched[rank][0],
            "order_bytes": len(order),
            "joiner_links": opened,
        }
        for rank in range(size)
        if rank != leaving
    ]


def _spent(marks: Sequence[Sequence[stayers.Mark]], since: int, rank: int) -> float:
    return marks[since + 1][rank].cpu_s - marks[since][rank].cpu_s


def _same_numbers(
    before: list[list[torch.Tensor]], after: list[list[torch.Tensor]], leaving: int, size: int
) -> None:
    """Raises RuntimeError: the collectives gave other results after the move."""
    after[leaving] = after[-1]
    for rank, (old, new) in enumerate(zip(before[:size], after[:size], strict=True)):
        if not old or not all(map(torch.equal, old, new)):
            raise RuntimeError(f"rank {rank}: other results of collectives after the switch")


def report_figures(report: Report, runs: dict[str, Facts], sizes: Sequence[int]) -> dict[str, Any]:
    """Rows and targets; returns the figures."""
    figures: dict[str, Any] = {}
    for size in sizes:
        found = runs[str(size)]
        linked = [run for run in found if run["links"]]
        figures[str(size)] = {
            "all": {key: summary(run[key] for run in found) for key in WORDS},
            "with new links": {key: summary(run[key] for run in linked) for key in WORDS},
            "stayers_with_new_links": summary(_linked_in(found)),
            "order_bytes": summary(run["order_bytes"] for run in found),
            "joiner_links": summary(run["joiner_links"] for run in found),
        }
        for key, words in WORDS.items():
            for who in ("all", "with new links"):
                facts, scale = figures[str(size)][who][key], SCALES.get(key, 1.0)
                scaled = {k: v if k == "n" else scale * v for k, v in facts.items()}
                report.row(f"{size} ranks, stayers: {who}", scaled, words)
        report.row(f"{size} ranks", figures[str(size)]["order_bytes"], "bytes of the order")
    most = [run["links"] for found in runs.values() for run in found]
    report.target(
        "links of a stayer, at most one for each of its groups and one for the vote",
        max(most, default=None),
        GROUPS,
        at_least=False,
    )
    for key in ("preparation_s", "switch_s"):
        small, large = (
            figures[str(size)]["with new links"][key] for size in (min(sizes), max(sizes))
        )
        before, after = median_of(small), median_of(large)
        ratio = after / before if before and after is not None else None
        text = f"{WORDS[key]}, of a stayer with new links: {max(sizes)} ranks against {min(sizes)}"
        report.target(text, ratio, FLAT, at_least=False)
    return figures


def _linked_in(found: Facts) -> list[int]:
    """In each move, how many stayers got new links."""
    moves: list[int] = []
    for run in found:
        if run["rank"] == 0:
            moves.append(0)
        moves[-1] += run["links"] > 0
    return moves


def measured(args: argparse.Namespace, report: Report, sizes: Sequence[int]) -> dict[str, Facts]:
    """All moves, the sizes by turns."""
    runs: dict[str, Facts] = {str(size): [] for size in sizes}
    with (
        tempfile.TemporaryDirectory() as folder,
        pool(max(sizes) + 1, str(Path(folder) / "store")) as processes,
    ):
        once(processes, min(sizes))
        for repeat, size in in_turn(args.repeats, tuple(runs)):
            report.progress(f"repeat {repeat + 1}: {size} ranks")
            runs[size] += once(processes, int(size))
    return runs


def main() -> int:
    parser = options("growth", __doc__)
    args = parsed(parser)
    sizes: tuple[int, ...] = SIZES
    if args.quick:
        args.repeats, sizes = 1, SIZES[:2]
    report = Report("growth", args)
    runs = report.attempt("growth", lambda: measured(args, report, sizes))
    if runs is None:
        return report.finish({}, {})
    return report.finish(runs, report_figures(report, runs, sizes))


if __name__ == "__main__":
    raise SystemExit(main())
