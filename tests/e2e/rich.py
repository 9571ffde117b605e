"""A training script with every common feature: accumulated gradients, a scaler that skips a step,
clipping, averaged weights, loader processes, evaluation and checkpoints inside the loop."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tmd.campaign.job import Net, Optimizer, begin, injector, samples
from tmd.trainer.state.digests import digest_of

ACCUMULATE = 2
OVERFLOWS = (12, 40, 90)
"""Steps in which the gradients of rank 1 are infinite, so that all ranks skip them."""


class Averaged(nn.Module):
    """Moving average of the weights."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        for name, param in net.named_parameters():
            self.register_buffer(name.replace(".", "_"), param.detach().clone())

    @torch.no_grad()
    def update(self) -> None:
        for mean, param in zip(self.buffers(), self._params(), strict=False):
            mean.lerp_(param, 0.1)

    def _params(self) -> list[Tensor]:
        return list(self.net.parameters())


def evaluate(net: nn.Module, data: TensorDataset) -> float:
    """Mean loss over all ranks, each on a different part."""
    net.eval()
    part = data.tensors[0][dist.get_rank() :: dist.get_world_size()]
    targets = data.tensors[1][dist.get_rank() :: dist.get_world_size()]
    with torch.no_grad():
        loss = nn.functional.cross_entropy(net(part), targets)
    net.train()
    dist.all_reduce(loss)
    return float(loss)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--unscaled", action="store_true", help="the scaler is disabled")
    args = parser.parse_args()
    session = begin()
    data = TensorDataset(*samples())
    sampler = session.sampler(len(data), 8, args.steps * ACCUMULATE, seed=3)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=1)
    net = Net(24)
    model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    average = Averaged(net)
    optimizer = Optimizer(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**10, growth_interval=7, enabled=not args.unscaled
    )
    session.register(
        model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, average=average
    )
    folder = Path(os.environ["TMD_TRACE"])

    for batches in session.batches(loader, accumulate=ACCUMULATE):
        with session.step() as step:
            optimizer.zero_grad()
            for number, (inputs, targets) in enumerate(batches):
                last = number == ACCUMULATE - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = nn.functional.cross_entropy(model(inputs), targets) / ACCUMULATE
                    bad = scaler.is_enabled() and session.step_number in OVERFLOWS
                    overflows = bad and session.rank == 1
                    scaler.scale(loss * torch.inf if overflows else loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            average.update()
            step.record(loss)
        scheduler.step()
        if session.step_number % 10 == 0:
            evaluate(net, data)
        if session.step_number % 25 == 0 and session.rank == 0 and not session.shadowing:
            torch.save(net.state_dict(), folder / "newest.pt")
        injector.reach("between")
    state = [*net.parameters(), *(average.buffers() if session.rank == 0 else ())]
    (folder / f"weights-{session.rank}").write_text(
        f"{digest_of(state)} scale {scaler.get_scale()}"
    )


if __name__ == "__main__":
    main()
