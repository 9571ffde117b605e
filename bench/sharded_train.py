"""The demo's GPT under FSDP2, so that every state exists once: what bench.snapshots measures."""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader

import tmd.trainer
from tmd.demo.train import GPT, StandardLibrary, arguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--snapshots", type=int, default=0)
    own, sys.argv[1:] = parser.parse_known_args()
    args = arguments()
    torch.manual_seed(args.seed)
    session = tmd.trainer.join()
    dist.init_process_group("tmd")
    data = StandardLibrary(args.context)
    sampler = session.sampler(len(data), args.batch, args.steps, args.seed)
    model = GPT(args.width, args.depth, args.heads, args.context)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    session.register(model=model, optimizer=optimizer, snapshots=own.snapshots)
    for tokens, targets in session.batches(DataLoader(data, args.batch, sampler=sampler)):
        with session.step() as step:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            step.record(loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
