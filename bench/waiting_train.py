"""The demo's GPT, small, whose forward pass also waits: a job that leaves the cores free.

Workers on GPUs leave most of a host's cores free while they compute. On a machine with few cores,
the demo's own job does not: a worker that starts there slows down all that train.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bench import gpt_job
from tmd.demo.train import GPT


class Waiting(GPT):
    """A GPT whose forward pass takes ``wait_s`` seconds more, in which it uses no core."""

    wait_s = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        time.sleep(self.wait_s)
        return super().forward(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wait-s", type=float, default=0.3)
    args = gpt_job.arguments(parser)
    session, loader = gpt_job.begun(args)
    gpt = Waiting(args.width, args.depth, args.heads, args.context)
    gpt.wait_s = args.wait_s
    model = DistributedDataParallel(gpt, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    session.register(model=model, optimizer=optimizer)
    gpt_job.train(session, loader, model, optimizer)


if __name__ == "__main__":
    main()
