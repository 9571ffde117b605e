"""The demo's GPT under FSDP2, so that every state exists once: what bench.snapshots measures."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench import gpt_job
from tmd.demo.train import GPT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--snapshots", type=int, default=0)
    args = gpt_job.arguments(parser)
    session, loader = gpt_job.begun(args)
    model = GPT(args.width, args.depth, args.heads, args.context)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    session.register(model=model, optimizer=optimizer, snapshots=args.snapshots)
    gpt_job.train(session, loader, model, optimizer)


if __name__ == "__main__":
    main()
