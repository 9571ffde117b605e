"""What passing collectives to an inner group costs: DDP through a passing group on Gloo, and DDP on
Gloo itself. Two ranks have both models in one process and train them in turn, step by step.

A figure is the median of a block of steps on rank 0. The groups use Gloo alike, so the difference
is what tmd does in each call.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.measure import Report, each, in_turn, options
from tmd.lifeline import die_with_parent

RANKS = 2
WARM = 5
"""Steps before the first that counts: DDP settles its buckets in them."""
LIMIT = 1.01
LONGEST_S = 600.0


def passing_group(rank: int) -> dist.ProcessGroup:
    """A group of all ranks whose collectives Gloo carries, ready for use."""
    from tmd.fabric.generations.generations import Generations
    from tmd.fabric.generations.gloo import builder
    from tmd.fabric.generations.passing import PassingGroup
    from tmd.fabric.solo import lone_fabric

    store = dist.distributed_c10d._get_default_store()
    fabric = lone_fabric(dist.PrefixStore("fabric", store), rank, RANKS)
    membership = fabric.membership
    assert membership is not None
    generations = Generations(builder(dist.PrefixStore("inner", store), fabric.worker))
    group = PassingGroup(fabric, "passing", range(RANKS), generations)
    generations.prepare([group.view], membership)
    if not generations.wait(LONGEST_S):
        why = generations.refusal or f"nothing after {LONGEST_S:g} s"
        raise RuntimeError(f"the group on Gloo was not built: {why}")
    generations.switch(membership.epoch)
    return group


class Trained:
    """A model and its optimizer, on one of the groups."""

    def __init__(self, group: dist.ProcessGroup | None, width: int) -> None:
        torch.manual_seed(0)
        layers = [each for _ in range(4) for each in (nn.Linear(width, width), nn.ReLU())]
        self.model = DistributedDataParallel(nn.Sequential(*layers), process_group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batch = torch.randn(16, width)

    def step(self) -> float:
        """Train one step; returns its seconds."""
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        return time.perf_counter() - began


def block(trained: dict[str, Trained], steps: int) -> dict[str, float]:
    """Medians: seconds of a step of each model, and the ratio of two steps next to each other.

    The models take turns in going first.
    """
    times: dict[str, list[float]] = {name: [] for name in trained}
    for _, name in in_turn(steps, [*trained]):
        times[name].append(trained[name].step())
    ratios = [ours / theirs for ours, theirs in zip(times["tmd"], times["gloo"], strict=True)]
    found = {name: statistics.median(each) for name, each in times.items()}
    return {**found, "ratio": statistics.median(ratios)}


def rank_main(rank: int, store: str, blocks: int, width: int, steps: int, out: Connection) -> None:
    """One rank; rank 0 sends the figures."""
    die_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    trained = {"tmd": Trained(passing_group(rank), width), "gloo": Trained(None, width)}
    block(trained, WARM)
    found = [block(trained, steps) for _ in range(blocks)]
    same = all(
        torch.equal(a, b)
        for a, b in zip(*(each.model.parameters() for each in trained.values()), strict=True)
    )
    if rank == 0:
        out.send((found, same))
    dist.barrier()
    os._exit(0)  # the threads of two process groups need not end in any order


def main() -> int:
    parser = options("passing", __doc__, repeats=20)
    parser.add_argument("--width", type=int, default=1024, help="four layers of this width")
    parser.add_argument("--steps", type=int, default=30, help="steps in a block")
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.width, args.steps = 1, 64, 3
    report = Report("passing", args)
    ours, theirs = mp.Pipe(duplex=False)
    spawn = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tmd-bench-") as scratch:
        store = str(Path(scratch, "store"))
        given = (store, args.repeats, args.width, args.steps, theirs)
        ranks = [spawn.Process(target=rank_main, args=(rank, *given)) for rank in range(RANKS)]
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
    figures = {name: each(found, name) for name in ("tmd", "gloo", "ratio")}
    report.row("through a passing group: step", figures["tmd"], "the same Gloo behind tmd's group")
    report.row("on Gloo itself: step", figures["gloo"], "the default group")
    report.row("ratio of neighbours", figures["ratio"], "a ratio, not seconds")
    target = f"step through a passing group / on Gloo <= {LIMIT}"
    report.target(target, figures["ratio"]["median"], LIMIT, at_least=False)
    return report.finish(runs, figures)


if __name__ == "__main__":
    raise SystemExit(main())
