"""The demo's GPT under FSDP2, so that every state exists once: what bench.snapshots measures."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader

import tmd.trainer
from tmd.demo.train import GPT, StandardLibrary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--snapshots", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(0)
    session = tmd.trainer.join()
    dist.init_process_group("tmd")
    data = StandardLibrary(args.context)
    sampler = session.sampler(len(data), args.batch, args.steps)
    model = GPT(args.width, args.depth, args.heads, args.context)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    session.register(model=model, optimizer=optimizer, snapshots=args.snapshots)
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
