"""The training script of campaigns and fault tests: small, with all state that is hard to move.

It has BatchNorm (rank-local state), dropout (random numbers), a scheduler, and data that are
shuffled and augmented.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

if "--sharded" not in sys.argv:  # FSDP2 needs the compiler's module
    import tmd.campaign.uncompiled

import tmd.trainer
from tmd.campaign.points import Injector
from tmd.trainer.state.digests import digest_of

injector = Injector()


class Net(nn.Module):
    def __init__(self, width: int, classes: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2)
        )
        self.head = nn.Linear(width, classes)
        self.register_buffer("mask", torch.ones(width))  # constant, like a causal mask

    def forward(self, x: Tensor) -> Tensor:
        injector.reach("forward")
        hidden = self.body(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: injector.reach("backward"))
        return self.head(hidden * self.mask)


def samples(size: int = 256) -> tuple[Tensor, Tensor]:
    """Inputs and targets of four classes, the same in each process."""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(size, 16, generator=draw), torch.randint(4, (size,), generator=draw)


class Augmented(TensorDataset):
    """Adds noise when an item is loaded, as random crops do."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        injector.reach("data")
        sample, target = super().__getitem__(index)
        return sample + 0.1 * torch.randn_like(sample), target


class Optimizer(torch.optim.AdamW):
    """AdamW with a fault point after the vote, in the middle of its work."""

    def _init_group(self, *args: object, **kwargs: object) -> object:
        injector.reach("optimizer")
        return super()._init_group(*args, **kwargs)


class Noisy(Optimizer):
    """Adds noise of its own, so that gradients alone do not determine its work."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with torch.no_grad():
            for param in self.param_groups[0]["params"]:
                param.add_(torch.randn_like(param), alpha=1e-3)
        return result


def sharded(net: Net) -> nn.Module:
    """Distribute parameters, gradients and optimizer state over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net.body, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def batches(
    args: argparse.Namespace,
    session: tmd.trainer.Session,
    loader: DataLoader[tuple[Tensor, ...]],
    evaluate: Callable[[], None] | None,
) -> Iterator[tuple[Tensor, ...]]:
    """The batches of all epochs, with an evaluation after each epoch."""
    # An earlier release that runs this script may not know an option.
    options = {"leave_early": True} if args.leave_early else {}
    for _ in range(args.epochs):
        yield from session.batches(loader, **options)
        if evaluate is not None:
            evaluate()


def barrier() -> None:
    """Stands for an evaluation, with a collective between two steps."""
    dist.all_reduce(torch.ones(1))


def communicate(args: argparse.Namespace, rank: int, inputs: Tensor) -> None:
    """Additional outputs of the ranks. With messages rank 1 computes with one of rank 0, received
    by name or from any rank."""
    if args.outputs:
        dist.all_reduce(torch.ones(args.outputs))
    if args.messages and rank == 0:
        dist.send(inputs, 1)
    elif args.messages and rank == 1:
        dist.recv(inputs, 0 if args.messages == "named" else None)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--halves", action="store_true", help="also make groups of half the ranks")
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--odd-host", default="", help="this host builds a different model")
    parser.add_argument("--blind-host", default="", help="this host loads different data")
    parser.add_argument("--slow-host", default="", help="this host is slow as a standby")
    parser.add_argument("--long-step", type=int, default=-1, help="this step takes much longer")
    parser.add_argument("--grow-step", type=int, default=-1, help="adds a parameter in this step")
    parser.add_argument("--messages", choices=("named", "any"), help="rank 0 sends to rank 1")
    parser.add_argument("--outputs", type=int, default=0, help="sums so many numbers in each step")
    parser.add_argument("--sharded", action="store_true", help="FSDP2: each state is unique")
    parser.add_argument("--snapshots", type=int, help="steps between two snapshots; 0 for none")
    parser.add_argument("--checkpoints", default="", help="folder for checkpoints")
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--wary", action="store_true", help="checks its results for errors")
    parser.add_argument("--leave-early", action="store_true", help="does not end a broken step")
    parser.add_argument("--loaders", type=int, default=0, help="processes that load data")
    parser.add_argument("--noisy", action="store_true", help="an optimizer that draws noise")
    parser.add_argument("--evaluate", type=int, default=0, help="steps between two evaluations")
    parser.add_argument("--pace", type=float, default=0.0, help="additional seconds for each step")
    parser.add_argument("--last", type=int, default=0, help="waits in this step until hurried")
    parser.add_argument("--work", type=float, default=0.0, help="seconds of work in each step")
    return parser.parse_args()


def begin() -> tmd.trainer.Session:
    """Join the job, with one seed on all ranks, and make the group of all ranks."""
    torch.manual_seed(0)
    session = tmd.trainer.join()
    injector.follow(session)
    dist.init_process_group("tmd")
    return session


def leave_digest(session: tmd.trainer.Session, net: nn.Module) -> None:
    """Record the digest of this worker's final weights."""
    weights = [*net.parameters(), *net.buffers()] if session.rank == 0 else net.parameters()
    folder = os.environ.get("TMD_TRACE")
    if folder:
        kind = "shadow" if session.shadowing else "weights"
        Path(folder, f"{kind}-{session.rank}").write_text(digest_of(weights))


def main() -> None:
    args = arguments()
    session = begin()
    if args.halves:
        for half in ([0, 1], [2]):
            dist.new_group(half)

    odd, slow, blind = (
        name and os.environ.get("TMD_WORKER", "").startswith(name + "/")
        for name in (args.odd_host, args.slow_host, args.blind_host)
    )
    data = Augmented(*samples())
    sampler = session.sampler(len(data), 8, args.steps, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=args.loaders)
    # Sharded over three ranks: a standby's shard must be as large as that of any rank.
    net = Net(args.width + 8 if odd else args.width, classes=6 if args.sharded else 4)
    model = sharded(net) if args.sharded else DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer = (Noisy if args.noisy else Optimizer)(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
    registered: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    session.register(**registered, snapshots=args.snapshots)
    if args.checkpoints:
        session.checkpoint(args.checkpoints, every=args.every)
    evaluate = session.repeatable(barrier) if args.evaluate else None
    for inputs, targets in batches(args, session, loader, evaluate):
        if (slow and session.shadowing) or session.step_number == args.long_step:
            time.sleep(0.5)
        if session.step_number == args.grow_step and not session.shadowing:
            optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(2)))
        with session.step() as step:
            optimizer.zero_grad()
            injector.work(args.work)
            communicate(args, session.rank, inputs)
            loss = nn.functional.cross_entropy(model(inputs * 2 if blind else inputs), targets)
            if args.wary and session._hooks.health.broken:
                raise ValueError("no such loss is possible")
            loss.backward()
            optimizer.step()
            step.record(loss)
        scheduler.step()
        if evaluate is not None and session.step_number % args.evaluate == 0:
            evaluate()
        injector.reach("between")
        injector.linger(args.pace, args.last)
    leave_digest(session, net)


if __name__ == "__main__":
    main()
