"""The demo's GPT, with gradients that the script sums by itself.

A standby can be given a rank with no iteration behind it: what bench.first_step compares with.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from bench import gpt_job
from tmd.demo.train import GPT
from tmd.trainer.worker import warmup


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cold", action="store_true", help="standbys run no iteration before")
    args = gpt_job.arguments(parser)
    if args.cold:
        warmup.SHADOW_STEPS = 0
    session, loader = gpt_job.begun(args)
    model = GPT(args.width, args.depth, args.heads, args.context)
    run = torch.compile(model) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    # Nothing tells that ranks are replicas, as DDP would.
    everybody = range(session.world_size)
    session.register(model=model, optimizer=optimizer, replicas=[everybody])
    gpt_job.train(session, loader, run, optimizer, partial(average, model))


def average(model: nn.Module) -> None:
    """The mean of all ranks' gradients, in one piece."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    whole = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(whole)
    whole /= dist.get_world_size()
    for grad, mean in zip(grads, whole.split([g.numel() for g in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


if __name__ == "__main__":
    main()
