"""The rival without tmd: DDP on Gloo under torchrun, with a checkpoint per step if asked for.

With ``--checkpoint`` rank 0 saves everything after every step (to the page cache, renamed when
complete) and all ranks resume from there: the least that a restart can lose.
"""

from __future__ import annotations

# ruff: noqa: E402 - the life line comes before the seconds that torch takes to import
from tmd.lifeline import die_with_parent

die_with_parent()

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

from bench import job


def main() -> None:
    args = job.arguments()
    torch.manual_seed(args.seed)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    trace = job.Trace(args, rank)
    bare = job.model(args)
    saved = load(args)
    if saved:
        bare.load_state_dict(saved["model"])
    model = DistributedDataParallel(bare, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = CosineAnnealingLR(optimizer, args.steps)
    start = 0
    if saved:
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        start = saved["step"] + 1
    for step, (tokens, targets) in enumerate(job.batches(args, rank, world, start), start):
        optimizer.zero_grad()
        loss = job.loss_of(model(tokens), targets)
        trace.fault(step)
        loss.backward()
        optimizer.step()
        scheduler.step()
        trace.committed(step, loss, world)
        if args.checkpoint and rank == 0:
            state = {
                "model": bare.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "step": step,
            }
            save(args, state)
    dist.destroy_process_group()


def load(args: argparse.Namespace) -> dict[str, Any] | None:
    """The last complete checkpoint, if there is one."""
    if args.checkpoint is None or not args.checkpoint.exists():
        return None
    state: dict[str, Any] = torch.load(args.checkpoint)
    return state


def save(args: argparse.Namespace, state: dict[str, Any]) -> None:
    """Write beside, then rename: a kill never leaves half a checkpoint."""
    beside = args.checkpoint.with_suffix(".new")
    torch.save(state, beside)
    os.replace(beside, args.checkpoint)


if __name__ == "__main__":
    main()
