"""The demo's GPT, small, whose forward pass also waits: a job that leaves the cores free.

Workers on GPUs leave most of a host's cores free while they compute. On a machine with few cores,
the demo's own job does not: a worker that starts there slows down all that train.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import tmd.trainer
from tmd.demo.train import GPT, StandardLibrary, arguments


class Waiting(GPT):
    """A GPT whose forward pass takes ``wait_s`` seconds more, in which it uses no core."""

    wait_s = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        time.sleep(self.wait_s)
        return super().forward(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wait-s", type=float, default=0.3)
    own, sys.argv[1:] = parser.parse_known_args()
    args = arguments()
    torch.manual_seed(args.seed)
    session = tmd.trainer.join()
    dist.init_process_group("tmd")
    data = StandardLibrary(args.context)
    sampler = session.sampler(len(data), args.batch, args.steps, args.seed)
    gpt = Waiting(args.width, args.depth, args.heads, args.context)
    gpt.wait_s = own.wait_s
    model = DistributedDataParallel(gpt, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    session.register(model=model, optimizer=optimizer)
    for tokens, targets in session.batches(DataLoader(data, args.batch, sampler=sampler)):
        with session.step() as step:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            step.record(loss)
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
