"""What passing collectives to an inner group costs: DDP through a passing group on Gloo, and DDP on
Gloo itself. All ranks have both models in one process and train them in turn, step by step. On a
GPU both are on NCCL.

A figure is the median of a block of steps on rank 0. The groups use the same library, so the
difference is what tmd does in each call.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.measure import Report, each, in_turn, interval, options, parsed
from tmd.lifeline import die_with_parent

WARM = 5
"""Steps before the first that counts: DDP changes its buckets in them."""
LIMIT = 1.01
LONGEST_S = 600.0


def passing_group(rank: int, ranks: int, device: str) -> dist.ProcessGroup:
    """A group of all ranks whose collectives Gloo or NCCL carries, ready for use."""
    from tmd.fabric.generations.carriers import carry
    from tmd.fabric.generations.passing import PassingGroup
    from tmd.fabric.solo import lone_fabric

    store = dist.distributed_c10d._get_default_store()
    fabric = lone_fabric(dist.PrefixStore("fabric", store), rank, ranks)
    membership = fabric.membership
    assert membership is not None
    carry(fabric, {"TMD_CPU": "gloo"} if device == "cpu" else {"TMD_CUDA": "nccl"})
    fabric.generations.enter(membership)
    group = PassingGroup(fabric, "passing", range(ranks))
    if fabric.generations.of(group.view, torch.empty(0, device=device).device) is None:
        raise RuntimeError(
            f"the inner group was not built: {fabric.generations.failure('passing')}"
        )
    return group


class Trained:
    """A model and its optimizer, on one of the groups."""

    def __init__(
        self, group: dist.ProcessGroup | None, width: int, batch: int, device: str
    ) -> None:
        torch.manual_seed(0)
        layers = [each for _ in range(4) for each in (nn.Linear(width, width), nn.ReLU())]
        model = nn.Sequential(*layers).to(device)
        self.model = DistributedDataParallel(model, process_group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(batch, width, device=device)

    def step(self) -> float:
        """Train one step; returns its seconds."""
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        if self.batch.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began


def block(trained: dict[str, Trained], steps: int) -> dict[str, float]:
    """Medians: seconds of a step of each model, and the ratio of two steps next to each other.

    The models take turns in going first.
    """
    times: dict[str, list[float]] = {name: [] for name in trained}
    for _, name in in_turn(steps, [*trained]):
        times[name].append(trained[name].step())
    ratios = [ours / theirs for ours, theirs in zip(times["tmd"], times["plain"], strict=True)]
    found = {name: statistics.median(each) for name, each in times.items()}
    return {**found, "ratio": statistics.median(ratios)}


def rank_main(rank: int, store: str, args: argparse.Namespace, out: Connection) -> None:
    """One rank; rank 0 sends the figures."""
    die_with_parent()
    torch.set_num_threads(1)
    os.environ.update(one_card(f"rank-{rank}"))
    backend = "gloo" if args.device == "cpu" else "nccl"
    place = dist.FileStore(store, args.ranks)
    dist.init_process_group(backend, store=place, rank=rank, world_size=args.ranks)
    trained = {
        name: Trained(group, args.width, args.batch, args.device)
        for name, group in {
            "tmd": passing_group(rank, args.ranks, args.device),
            "plain": None,
        }.items()
    }
    block(trained, WARM)
    found = [block(trained, args.steps) for _ in range(args.repeats)]
    same = all(
        torch.equal(a, b)
        for a, b in zip(*(each.model.parameters() for each in trained.values()), strict=True)
    )
    if rank == 0:
        out.send((found, same))
    dist.barrier()
    os._exit(0)  # the threads of two process groups need not end in any order


def one_card(worker: str) -> dict[str, str]:
    """Variables that let several ranks of NCCL share one GPU of one host, over sockets.

    NCCL refuses two ranks on one GPU, which it recognises by its host and its bus id.
    """
    return {
        "NCCL_HOSTID": worker,
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
        "NCCL_MAX_NCHANNELS": "2",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }


def main() -> int:
    parser = options("passing", __doc__, repeats=20)
    parser.add_argument("--width", type=int, default=1024, help="four layers of this width")
    parser.add_argument("--batch", type=int, default=16, help="rows of a rank's batch")
    parser.add_argument("--steps", type=int, default=30, help="steps in a block")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parsed(parser)
    if args.quick:
        args.repeats, args.width, args.batch, args.steps = 1, 64, 16, 3
    report = Report("passing", args)
    ours, theirs = mp.Pipe(duplex=False)
    spawn = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tmd-bench-") as scratch:
        store = str(Path(scratch, "store"))
        given = (store, args, theirs)
        ranks = [spawn.Process(target=rank_main, args=(r, *given)) for r in range(args.ranks)]
        for rank in ranks:
            rank.start()
        theirs.close()
        try:
            if not ours.poll(LONGEST_S):
                raise RuntimeError(
                    f"no figures after {LONGEST_S:g} s: give fewer --repeats or a smaller --width"
                )
            found, same = ours.recv()
        finally:
            for rank in ranks:
                rank.join(10)
                rank.kill()
    if not same:
        raise RuntimeError("the two models have different weights: one of the groups is wrong")
    runs = {"blocks": found}
    figures: dict[str, Any] = {name: each(found, name) for name in ("tmd", "plain", "ratio")}
    figures["ratio"]["interval_95"] = interval([block["ratio"] for block in found])
    library = "Gloo" if args.device == "cpu" else "NCCL"
    report.row("through a passing group: step", figures["tmd"], f"{library} behind tmd's group")
    report.row(f"on {library} itself: step", figures["plain"], "the default group")
    report.row("ratio of neighbours", figures["ratio"], "a ratio, not seconds")
    target = f"step through a passing group / on {library} <= {LIMIT}"
    report.target(target, figures["ratio"]["median"], LIMIT, at_least=False)
    return report.finish(runs, figures)


if __name__ == "__main__":
    raise SystemExit(main())
