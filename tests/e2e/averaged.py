"""A training script as many are: an average of the weights that hands out copies in its state, a
generator of its own, and a buffer that the model makes in its first forward pass."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tmd.campaign.job import begin, injector, samples
from tmd.trainer.state.digests import digest_of


class Net(nn.Module):
    mask: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 24), nn.Linear(24, 4)
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(24)
        out: Tensor = self.first(x).relu() * self.mask
        if out.requires_grad:
            out.register_hook(lambda _: injector.reach("backward"))
        return self.last(out)


class Average:
    """Moving average of the weights, with noise."""

    def __init__(self, net: nn.Module) -> None:
        self.weights = {name: p.detach().clone() for name, p in net.named_parameters()}
        self.noise = torch.Generator().manual_seed(5)

    @torch.no_grad()
    def update(self, net: nn.Module) -> None:
        for name, param in net.named_parameters():
            weight = self.weights[name].lerp_(param, 0.1)
            weight.add_(torch.randn(weight.shape, generator=self.noise), alpha=1e-3)

    def state_dict(self) -> dict[str, Any]:
        weights = {name: weight.clone() for name, weight in self.weights.items()}
        return {"weights": weights, "noise": self.noise.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = {name: weight.clone() for name, weight in state["weights"].items()}
        self.noise.set_state(state["noise"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    session = begin()
    data = TensorDataset(*samples())
    loader = DataLoader(
        data, batch_size=8, sampler=session.sampler(len(data), 8, args.steps, seed=3)
    )
    net = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = Average(net)
    session.register(model=model, optimizer=optimizer, average=average)

    for inputs, targets in session.batches(loader):
        with session.step() as step:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            average.update(net)
            step.record(loss)
    state = [*net.parameters(), *average.weights.values(), average.noise.get_state()]
    folder = Path(os.environ["TMD_TRACE"])
    if not session.shadowing:
        (folder / f"weights-{session.rank}").write_text(digest_of(state))


if __name__ == "__main__":
    main()
