"""Two models that train in turn, each with DDP, an optimizer and a step of its own, as in a GAN.

Which one trains follows from the step number. A standby computes shadow iterations at step 0, so
it has not used the second model when it takes a rank.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tmd.campaign.job import begin, injector, leave_digest


class Net(nn.Module):
    """Its parameters are used in another order than that in which they are made. All gradients fit
    into one bucket of DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(16, 4), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        injector.reach("forward")
        if out.requires_grad:
            out.register_hook(lambda _: injector.reach("backward"))
        return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    session = begin()
    models = [DistributedDataParallel(Net()) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    session.register(model=models, optimizer=optimizers)
    sampler = session.sampler(240, 4, args.steps, seed=3)
    data = torch.randn(240, 8, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    for batch in session.batches(loader):
        number = session.step_number % 2
        with session.step() as step:
            optimizers[number].zero_grad()
            loss = models[number](batch).pow(2).mean()
            loss.backward()
            optimizers[number].step()
            step.record(loss)
        injector.reach("between")
    leave_digest(session, nn.ModuleList(models))


if __name__ == "__main__":
    main()
