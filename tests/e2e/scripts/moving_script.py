"""Weights that change besides by an optimizer: in a step before it, those of a momentum encoder or
with SAM; after it, those of an average, or all when they are clipped; all while an evaluation uses
the average."""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tmd.campaign.job import begin, injector, leave_digest


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        if out.requires_grad:
            injector.reach("forward")
            out.register_hook(lambda _: injector.reach("backward"))
        return out


@torch.no_grad()
def follow(key: nn.Module, query: nn.Module) -> None:
    """The key encoder follows the query encoder, as in MoCo."""
    for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
        slow.mul_(0.9).add_(fast, alpha=0.1)


@torch.no_grad()
def climb(model: nn.Module) -> list[Tensor]:
    """Perturb the weights along their gradients, as SAM does; returns the former ones."""
    before = [param.clone() for param in model.parameters()]
    for param in model.parameters():
        assert param.grad is not None
        param.add_(param.grad, alpha=0.05)
        param.grad = None
    return before


@torch.no_grad()
def descend(model: nn.Module, before: list[Tensor]) -> None:
    for param, value in zip(model.parameters(), before, strict=True):
        param.copy_(value)


@torch.no_grad()
def clip(model: nn.Module) -> None:
    """As for the critic of a Wasserstein GAN."""
    for param in model.parameters():
        param.clamp_(-0.1, 0.1)


@torch.no_grad()
def evaluated(model: nn.Module, average: nn.Module) -> None:
    """Give the model the averaged weights for a while, as torch_ema does."""
    before = [param.clone() for param in model.parameters()]
    for param, value in zip(model.parameters(), average.parameters(), strict=True):
        param.data.copy_(value)
    try:
        injector.reach("evaluating")
        torch.distributed.all_reduce(model(torch.ones(1, 8)))
    finally:
        descend(model, before)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sam", action="store_true")
    parser.add_argument("--average", action="store_true")
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--evaluate", action="store_true")
    args = parser.parse_args()
    averages = args.average or args.evaluate
    session = begin()
    query = DistributedDataParallel(Net())
    average = AveragedModel(query.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    key = average if averages else copy.deepcopy(query.module)
    key.requires_grad_(False)
    optimizer = torch.optim.SGD(query.parameters(), lr=0.1, momentum=0.9)
    session.register(model=[query, key], optimizer=optimizer)
    evaluate = session.repeatable(lambda: evaluated(query.module, average.module), name="evaluate")
    sampler = session.sampler(240, 4, args.steps, seed=3)
    data = torch.randn(240, 8, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    for batch in session.batches(loader):
        with session.step() as step:
            optimizer.zero_grad()
            if not (args.sam or averages or args.clip):
                follow(key, query.module)
            loss = (query(batch) - key(batch)).pow(2).mean() + query(batch).pow(2).mean()
            loss.backward()
            if args.sam:
                before = climb(query.module)
                query(batch).pow(2).mean().backward()
                descend(query.module, before)
            optimizer.step()
            if args.clip:
                clip(query.module)
            step.record(loss)
        if averages:
            average.update_parameters(query.module)
        if args.evaluate:
            evaluate()
        injector.reach("between")
    leave_digest(session, nn.ModuleList([query, key]))


if __name__ == "__main__":
    main()
