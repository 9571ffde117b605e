"""All-reduce of tmd against Gloo: four processes on this machine, both backends in one run.

Per size and repeat the backends take turns, so that noise of the machine hits both. A figure is the
time of one all-reduce as the slowest rank sees it, the median over the iterations of a repeat.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

SIZES = {
    "4 kB": 4 << 10,
    "64 kB": 64 << 10,
    "1 MB": 1 << 20,
    "25 MB": 25 << 20,
    "100 MB": 100 << 20,
}
ITERATIONS = {4 << 10: 100, 64 << 10: 60, 1 << 20: 30, 25 << 20: 5, 100 << 20: 2}
BACKENDS = ("tmd", "gloo")
TIMEOUT = 600.0


def rank_main(rank: int, world: int, port: int, repeats: int, pipe: Connection) -> None:
    """One rank; rank 0 sends the figures through ``pipe``."""
    import tmd.fabric  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group("tmd", store=store, rank=rank, world_size=world)
    groups = {"tmd": None, "gloo": dist.new_group(backend="gloo")}
    figures = []
    for label, size in SIZES.items():
        tensor = torch.zeros(size // 4)
        for group in groups.values():
            dist.all_reduce(tensor, group=group)
        for repeat in range(repeats):
            order = BACKENDS if repeat % 2 == 0 else BACKENDS[::-1]
            for backend in order:
                seconds = measure(tensor, groups[backend], ITERATIONS[size])
                figures.append({"size": label, "backend": backend, "seconds": seconds})
    if rank == 0:
        pipe.send(figures)
    dist.barrier()
    dist.destroy_process_group()


def measure(tensor: torch.Tensor, group: dist.ProcessGroup | None, iterations: int) -> float:
    """Median seconds of one all-reduce, on the slowest rank."""
    times = []
    for _ in range(iterations):
        start = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        times.append(time.perf_counter() - start)
    median = torch.tensor(statistics.median(times), dtype=torch.float64)
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return median.item()


def run(world: int, repeats: int) -> list[dict[str, object]]:
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    free = port.port
    del port
    processes = [
        context.Process(target=rank_main, args=(r, world, free, repeats, there), daemon=True)
        for r in range(world)
    ]
    try:
        for process in processes:
            process.start()
        if not here.poll(TIMEOUT):
            raise TimeoutError("no figures")
        figures: list[dict[str, object]] = here.recv()
        for process in processes:
            process.join(30)
        return figures
    finally:
        for process in processes:
            process.kill()
            process.join(5)


def table(figures: list[dict[str, object]]) -> str:
    """Median, min and max per size and backend in milliseconds, and the ratio of the medians."""
    lines = [f"{'size':>7} {'tmd ms':>27} {'gloo ms':>27} {'tmd/gloo':>9}"]
    for label in SIZES:
        cells, medians = [], []
        for backend in BACKENDS:
            ms = [
                1e3 * float(str(f["seconds"]))
                for f in figures
                if f["size"] == label and f["backend"] == backend
            ]
            medians.append(statistics.median(ms))
            cells.append(f"{medians[-1]:9.3f} ({min(ms):.3f}-{max(ms):.3f})")
        ratio = medians[0] / medians[1]
        lines.append(f"{label:>7} {cells[0]:>27} {cells[1]:>27} {ratio:9.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("bench/results/collectives.json"))
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures = run(args.ranks, args.repeats)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cores": os.cpu_count(), "kernel": platform.release(), "torch": torch.__version__}
    result = {"ranks": args.ranks, "repeats": args.repeats, "machine": machine, "figures": figures}
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(table(figures))


if __name__ == "__main__":
    main()
