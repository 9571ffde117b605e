"""All-reduce of tmd against Gloo: four processes on this machine, which run them in turn.

tmd is measured twice: as it is, and so that each operation could be finished after a loss, as it
works while a hot standby follows a rank. There is no standby, so what is sent to one is not
measured. A figure is the time of one all-reduce as the slowest rank sees it, the median over the
iterations of a repeat.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.measure import Facts, Report, each, in_turn, options, parsed
from tests.fabric.pool import Pool, pool
from tmd.fabric import Group

SIZES = {
    "4 kB": 4 << 10,
    "64 kB": 64 << 10,
    "1 MB": 1 << 20,
    "25 MB": 25 << 20,
    "100 MB": 100 << 20,
}
ITERATIONS = {4 << 10: 100, 64 << 10: 60, 1 << 20: 30, 25 << 20: 5, 100 << 20: 2}
FINISHABLE = "tmd, finishable"
WAYS = ("tmd", FINISHABLE, "gloo")
RANKS = 4

_gloo: list[dist.ProcessGroup] = []
"""In a process of the pool: the group of Gloo."""


# --- in the processes -----------------------------------------------------------------------------


def begin(rank: int, size: int, store: dist.Store) -> None:
    import tmd.fabric  # noqa: F401 - registers the backend

    dist.init_process_group("tmd", store=store, rank=rank, world_size=size)
    _gloo.append(dist.new_group(backend="gloo"))


def end(rank: int, size: int, store: dist.Store) -> None:
    dist.destroy_process_group()


def seconds_of(rank: int, size: int, store: dist.Store, way: str, nbytes: int, count: int) -> float:
    """Median duration of ``count`` all-reduces, in seconds."""
    world = dist.group.WORLD
    assert isinstance(world, Group)
    world.log.restart(keeps=way == FINISHABLE)
    group = _gloo[0] if way == "gloo" else world
    tensor = torch.zeros(nbytes // 4)
    dist.all_reduce(tensor, group=group)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


# --- the benchmark --------------------------------------------------------------------------------


def measured(processes: Pool, repeats: int, report: Report) -> dict[str, Facts]:
    """By size and way, what each repeat has shown."""
    processes.run(begin)
    runs: dict[str, Facts] = {f"{size} {way}": [] for size in SIZES for way in WAYS}
    for size, nbytes in SIZES.items():
        report.progress(f"{size}: {repeats} repeats")
        for repeat, way in in_turn(repeats, WAYS):
            found = processes.run(seconds_of, way, nbytes, ITERATIONS[nbytes])
            runs[f"{size} {way}"].append({"seconds": max(found), "place": (repeat, 0)})
    processes.run(end)
    return runs


def tell(report: Report, runs: dict[str, Facts]) -> dict[str, Any]:
    """Report rows; return the figures."""
    figures = {name: each(found, "seconds") for name, found in runs.items()}
    for name, shown in figures.items():
        report.row(name, shown)
    return figures


def main() -> int:
    parser = options("collectives", __doc__)
    args = parsed(parser)
    if args.quick:
        args.repeats = 1
    report = Report("collectives", args)
    with (
        tempfile.TemporaryDirectory() as folder,
        pool(RANKS, str(Path(folder) / "store")) as processes,
    ):
        runs = report.attempt("collectives", lambda: measured(processes, args.repeats, report))
    if runs is None:
        return report.finish({}, {})
    return report.finish(runs, tell(report, runs))


if __name__ == "__main__":
    raise SystemExit(main())
