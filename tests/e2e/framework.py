"""A training loop as frameworks have it: the step is no block, the optimizer gets a closure, the
loader is cut for a rank, the last gradients are accumulated over fewer batches, and an evaluation
gathers from all ranks in the loop and after it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

import tmd.trainer
from tmd.campaign.job import Net, Optimizer, begin, injector, samples
from tmd.trainer import DataPlace, StepResult
from tmd.trainer.state.digests import digest_of

ACCUMULATE = 2
BATCH = 8
EVALUATE = 5
"""Steps between two evaluations. An evaluation counts as a step, too."""


class Accelerated(torch.optim.Optimizer):
    """Wraps an optimizer as Accelerate does: without the constructor of its base class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure=None):
        return self.optimizer.step(closure)


Accelerated.__name__ = "AcceleratedOptimizer"


class Trainer:
    """Owns the loop; the script only gives it what it needs."""

    def __init__(self, session: tmd.trainer.Session, model: nn.Module, optimizer: Accelerated):
        self.session, self.model, self.optimizer = session, model, optimizer
        self.total = session.counter("total", 0.0)
        self.evaluations = session.counter("evaluations", ())
        self.spoilt = 0
        draw = torch.Generator().manual_seed(2)
        self.held_out = torch.randn(24, 16, generator=draw)
        self.evaluate = session.repeatable(self._evaluate, self._report)

    @torch.no_grad()
    def _evaluate(self) -> str:
        """The mean output over all ranks; each has a part of the data."""
        net = self.model.module
        assert isinstance(net, nn.Module)
        net.eval()
        try:
            total = net(self.held_out[self.session.rank :: self.session.world_size]).sum()
        finally:
            net.train()
        injector.reach("evaluation")
        dist.all_reduce(total)
        value = float(total).hex()
        self.evaluations.value = (*self.evaluations.value, value)
        return value

    def _report(self, value: str) -> None:
        if self.session.rank == 0:
            with Path(os.environ["TMD_TRACE"], "reports").open("a") as file:
                file.write(f"{len(self.evaluations.value)} {value}\n")

    def loss_of(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(inputs), targets)

    def count(self) -> None:
        """A number of the whole run: a rank that lacks its past ends with another one."""
        self.total.value += float(next(self.model.parameters()).detach().sum())

    def closure(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        self.optimizer.optimizer.zero_grad()
        # One forward: DDP of torch 2.11 refuses two with a BatchNorm before a backward.
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        loss = self.loss_of(inputs, targets)
        injector.reach("forward")
        loss.backward()
        injector.reach("backward")
        return loss

    def training_step(self, batches: list[tuple[Tensor, Tensor]]) -> StepResult:
        step = self.session.begin()
        loss = step.run(self.optimizer.step, lambda: self.closure(batches))
        step.run(self.count)
        injector.reach("between")
        result = step.end(loss)
        self.spoilt += result is StepResult.SPOILT
        if self.session.position.index % (EVALUATE * ACCUMULATE) == 0:
            self.evaluate()
        return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    session = begin()
    # One batch less than all steps need: the last step has half of them.
    size = dist.get_world_size() * BATCH * (args.steps * ACCUMULATE - 1)
    data = TensorDataset(*samples(size))

    def cut(place: DataPlace) -> DataLoader[tuple[Tensor, ...]]:
        part = Subset(data, range(place.part, size, place.parts))
        return DataLoader(part, batch_size=BATCH)

    model = DistributedDataParallel(Net(24), bucket_cap_mb=0.001)
    optimizer = Accelerated(Optimizer(model.parameters(), lr=1e-2))
    trainer = Trainer(session, model, optimizer)
    session.register(model=model, optimizer=optimizer)
    for batches in session.batches(cut, accumulate=ACCUMULATE, partial=True):
        trainer.training_step(batches)
    trainer.evaluate()
    folder = Path(os.environ["TMD_TRACE"])
    digest = digest_of([*model.parameters()])
    numbers = f"total {trainer.total.value!r} evaluations {trainer.evaluations.value}"
    (folder / f"weights-{session.rank}").write_text(f"{digest} {numbers}")
    (folder / f"spoilt-{session.rank}-{os.getpid()}").write_text(str(trainer.spoilt))


if __name__ == "__main__":
    main()
