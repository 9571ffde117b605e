"""The demo's GPT, with gradients that the script sums by itself.

Without DDP, whose buckets change after the first iteration, a standby can be given a rank with no
iteration behind it: what bench.first_step compares with.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import tmd.trainer
from tmd.demo.train import GPT, StandardLibrary, arguments
from tmd.trainer.worker import warmup


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cold", action="store_true", help="standbys run no iteration before")
    own, sys.argv[1:] = parser.parse_known_args()
    args = arguments()
    if own.cold:
        warmup.SHADOW_STEPS = 0
    torch.manual_seed(args.seed)
    session = tmd.trainer.join()
    dist.init_process_group("tmd")
    data = StandardLibrary(args.context)
    sampler = session.sampler(len(data), args.batch, args.steps, args.seed)
    loader = DataLoader(data, args.batch, sampler=sampler, num_workers=args.loader_workers)
    model = GPT(args.width, args.depth, args.heads, args.context)
    run = torch.compile(model) if args.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    # Nothing tells that ranks are replicas, as DDP would.
    everybody = range(session.world_size)
    session.register(model=model, optimizer=optimizer, replicas=[everybody])
    for tokens, targets in session.batches(loader):
        with session.step() as step:
            optimizer.zero_grad()
            loss = functional.cross_entropy(run(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            average(model)
            optimizer.step()
            step.record(loss)
    dist.destroy_process_group()


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
