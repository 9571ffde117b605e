"""Small training scripts: the objects they register, and the work of one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tmd.trainer.state.state import Registry

Optimize = Callable[[nn.Module], Sequence[Optimizer]]
Build = Callable[[], nn.Module]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


def matrices() -> nn.Module:
    widths = ((6, 5), (5, 5), (5, 4))
    return nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in widths))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4))


def frozen() -> nn.Module:
    model = mlp()
    first = model.get_parameter("0.weight")
    first.requires_grad_(False)
    return model


def adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=0.01)]


class Script:
    """Model, optimizers and other registered objects; a batch is a function of its number."""

    def __init__(self, seed: int, optimize: Optimize = adamw, build: Build = mlp) -> None:
        torch.manual_seed(seed)
        self.model = build()
        self.optimizers = list(optimize(self.model))
        self.others: dict[str, object] = {}
        self.before: Callable[[int], None] = lambda number: None
        """Called with the number of an optimizer that is about to run."""
        for number, optimizer in enumerate(self.optimizers):
            optimizer.register_step_pre_hook(lambda *_, n=number: self.before(n))

    def registry(self) -> Registry:
        return Registry({"model": self.model, "optimizer": self.optimizers, **self.others})

    def backward(self, batch: int) -> None:
        """Everything before the optimizers."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.loss(batch).backward()

    def apply(self) -> None:
        """The optimizers, and everything after them."""
        for optimizer in self.optimizers:
            optimizer.step()

    def loss(self, batch: int) -> Tensor:
        out: Tensor = self.model(inputs(batch))
        return out.square().mean()

    def train(self, batches: range) -> None:
        """Some steps without a shadow."""
        for batch in batches:
            self.backward(batch)
            self.apply()


def inputs(batch: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(batch))


class Scheduled(Script):
    """Two parameter groups whose learning rates a scheduler halves."""

    def __init__(self, seed: int, lr: float | Tensor = 0.01) -> None:
        def groups(model: nn.Module) -> list[Optimizer]:
            first, second = model.get_submodule("0"), model.get_submodule("2")
            slow = {"params": list(second.parameters()), "lr": lr / 8, "weight_decay": 0.1}
            both: list[dict[str, Any]] = [{"params": list(first.parameters())}, slow]
            foreach = False if isinstance(lr, Tensor) else None
            return [AdamW(both, lr=lr, foreach=foreach)]

        super().__init__(seed, groups)
        self.scheduler = StepLR(self.optimizers[0], 2, 0.5)
        self.others["scheduler"] = self.scheduler

    def apply(self) -> None:
        super().apply()
        self.scheduler.step()


class Forked(Script):
    """One layer is used in every third step only, and one in none."""

    def __init__(self, seed: int, optimize: Optimize = adamw) -> None:
        super().__init__(seed, optimize, self._build)

    @staticmethod
    def _build() -> nn.Module:
        return nn.ModuleDict({"main": mlp(), "rare": nn.Linear(6, 4), "never": nn.Linear(6, 4)})

    def loss(self, batch: int) -> Tensor:
        assert isinstance(self.model, nn.ModuleDict)
        out: Tensor = self.model["main"](inputs(batch))
        if batch % 3 == 0:
            out = out + self.model["rare"](inputs(batch))
        return out.square().mean()


class Averaged(Script):
    """A moving average of the parameters, every few steps, that no optimizer knows."""

    def __init__(self, seed: int, every: int = 1) -> None:
        super().__init__(seed)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.others["ema"] = self.ema
        self._every = every
        self._batch = 0

    def backward(self, batch: int) -> None:
        self._batch = batch
        super().backward(batch)

    def apply(self) -> None:
        super().apply()
        if self._batch % self._every == 0:
            self.ema.update_parameters(self.model)


class Closed(Script):
    """LBFGS: the optimizer itself calls forward and backward."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, lambda m: [torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3)])
        self._batch = 0

    def backward(self, batch: int) -> None:
        self._batch = batch

    def apply(self) -> None:
        def closure() -> float:
            super(Closed, self).backward(self._batch)
            return self.loss(self._batch).item()

        self.optimizers[0].step(closure)


class Scaled(Script):
    """A fused optimizer takes scaled gradients and unscales them itself."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, lambda m: [AdamW(m.parameters(), lr=0.01, fused=True)])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        self.others["scaler"] = self.scaler

    def backward(self, batch: int) -> None:
        self.optimizers[0].zero_grad()
        self.scaler.scale(self.loss(batch)).backward()

    def apply(self) -> None:
        self.scaler.step(self.optimizers[0])
        self.scaler.update()


class Sparse(Script):
    """Gradients that are sparse."""

    def __init__(self, seed: int) -> None:
        def optimize(model: nn.Module) -> list[Optimizer]:
            table = list(model.get_submodule("0").parameters())
            rest = list(model.get_submodule("1").parameters())
            return [torch.optim.SparseAdam(table, lr=0.01), SGD(rest, lr=0.01)]

        super().__init__(
            seed, optimize, lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3))
        )

    def loss(self, batch: int) -> Tensor:
        drawn = torch.randint(9, (8,), generator=torch.Generator().manual_seed(batch))
        out: Tensor = self.model(drawn)
        return out.square().mean()


class Hiding(Optimizer):
    """Momentum in an attribute that ``state_dict()`` leaves out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.01})
        self.velocity: dict[int, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Heavy ball."""
        params = [p for group in self.param_groups for p in group["params"]]
        for number, param in enumerate(params):
            if param.grad is not None:
                held = self.velocity.setdefault(number, torch.zeros_like(param))
                held.mul_(0.9).add_(param.grad)
                param.sub_(held, alpha=0.01)
