"""What the benchmarks' variants of the demo's job share: the data and the steps of a session."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import tmd.trainer
from tmd.demo.train import StandardLibrary
from tmd.demo.train import arguments as demo_arguments
from tmd.trainer import Session


def arguments(own: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of ``own`` and those of the demo."""
    ours, sys.argv[1:] = own.parse_known_args()
    return argparse.Namespace(**vars(ours), **vars(demo_arguments()))


def begun(args: argparse.Namespace) -> tuple[Session, DataLoader[Any]]:
    """The session of this worker, and its batches."""
    torch.manual_seed(args.seed)
    session = tmd.trainer.join()
    dist.init_process_group("tmd")
    data = StandardLibrary(args.context)
    sampler = session.sampler(len(data), args.batch, args.steps, args.seed)
    return session, DataLoader(data, args.batch, sampler=sampler, num_workers=args.loader_workers)


def train(
    session: Session,
    loader: DataLoader[Any],
    model: Callable[[Tensor], Tensor],
    optimizer: Optimizer,
    before_optimizer: Callable[[], None] = lambda: None,
) -> None:
    """All steps of the job."""
    for tokens, targets in session.batches(loader):
        with session.step() as step:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            step.record(loss)
            loss.backward()
            before_optimizer()
            optimizer.step()
    dist.destroy_process_group()
