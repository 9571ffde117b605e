"""A step that is broken and repeated leads to the same weights, whatever the script does in it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from tests.marks import thorough
from tests.trainer.standalone import Voting
from tmd.trainer import Session

STEPS = 6


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


class Trained:
    """A small job whose step number ``lost`` is broken at its vote."""

    count = STEPS
    """Number of batches."""

    def __init__(self, lost: int | None) -> None:
        torch.manual_seed(1)
        self.hooks = Voting()
        self.hooks.lost = set() if lost is None else {lost}
        self.session = Session(self.hooks)
        self.model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        samples = [self.sample(number) for number in range(2 * self.count)]
        self.batches = self.loader(DataLoader(samples, batch_size=2))  # type: ignore[arg-type]
        self.session.register(model=self.model, optimizer=self.optimizer, **self.others())
        for batch in self.session.batches(self.batches):
            self.run(self.session.step_number, batch)

    def run(self, number: int, batch: dict[str, Tensor]) -> None:
        with self.session.step():
            self.step(number, batch)

    def sample(self, number: int) -> dict[str, Tensor]:
        return {"x": torch.ones(2), "y": torch.zeros(2)}

    def loader(self, batches: Any) -> Any:
        return batches

    def others(self) -> dict[str, Any]:
        return {}

    def step(self, number: int, batch: dict[str, Tensor]) -> None:
        raise NotImplementedError

    def descend(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()

    @property
    def result(self) -> list[Tensor]:
        return list(self.model.parameters())


class Zeroed(Trained):
    """Gradients are set to zero instead of removed, and every other step uses only a part."""

    def step(self, number: int, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        out = self.model["a"](batch["x"])
        if number % 2 == 0:
            out = out + self.model["b"](batch["x"])
        self.descend((out - batch["y"]).pow(2).sum())


class Changed(Trained):
    """The script changes its batch: a tensor in place, and the dictionary itself."""

    def step(self, number: int, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        target = batch.pop("y")
        inputs = batch["x"].mul_(0.5)
        out = self.model["b"](self.model["a"](inputs))
        self.descend((out - target).pow(2).sum())


class Stream:
    """Batches that go on where they were left when they are iterated again."""

    def __init__(self, batches: Any) -> None:
        self._batches = iter(batches)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        return next(self._batches)


class Streamed(Changed):
    """And the batches come from a stream."""

    def loader(self, batches: Any) -> Any:
        return Stream(batches)


class Listed(Changed):
    """And the batches are in a list, in which the changed one would come again."""

    def loader(self, batches: Any) -> Any:
        return list(batches)


class Averaged(Trained):
    """An average of the weights is updated at the end of each step; in one a scaler overflows."""

    def others(self) -> dict[str, Any]:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        average = get_ema_multi_avg_fn(0.9)
        self.average = AveragedModel(self.model, multi_avg_fn=average)
        return {"average": self.average, "scaler": self.scaler}

    def step(self, number: int, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        out = self.model["b"](self.model["a"](batch["x"]))
        loss = out.pow(2).sum() * (float("inf") if number == 3 else 1.0)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.average.update_parameters(self.model)

    @property
    def result(self) -> list[Tensor]:
        return [*self.average.parameters(), torch.tensor(self.scaler.get_scale())]


class ScalesInside:
    """A scaler in a class of the script, as timm has one."""

    def __init__(self) -> None:
        self._scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def __call__(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        self._scaler.scale(loss).backward()
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state)


class Wrapped(Trained):
    """A scaler that is only in a registered object overflows in one step."""

    def others(self) -> dict[str, Any]:
        self.scales = ScalesInside()
        return {"scaler": self.scales}

    def step(self, number: int, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        out = self.model["b"](self.model["a"](batch["x"]))
        self.scales(out.pow(2).sum() * (float("inf") if number == 3 else 1.0), self.optimizer)

    @property
    def result(self) -> list[Tensor]:
        return [torch.tensor(self.scales._scaler.get_scale())]


class Cached(Trained):
    """A step puts a larger buffer in the place of one, removes one, and uses an expanded one."""

    def others(self) -> dict[str, Any]:
        self.model.register_buffer("cache", torch.zeros(2), persistent=False)
        self.model.register_buffer("unused", torch.zeros(2), persistent=False)
        self.model.register_buffer("wide", torch.ones(1).expand(3), persistent=False)
        return {}

    def step(self, number: int, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        if number == 3:
            self.model.cache = torch.ones(5)
            self.model.register_buffer("unused", None)
        size = len(self.model.get_buffer("cache"))
        self.descend(self.model["b"](self.model["a"](batch["x"] * size)).sum())


class Skipped(Trained):
    """One batch leads to no update, on all ranks alike. An average is updated all the same."""

    def others(self) -> dict[str, Any]:
        self.model["norm"] = nn.BatchNorm1d(2)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return {"average": self.average}

    def sample(self, number: int) -> dict[str, Tensor]:
        return {"x": torch.full((2,), float(number)), "y": torch.zeros(2)}

    def run(self, number: int, batch: dict[str, Tensor]) -> None:
        with self.session.step() as step:
            self.optimizer.zero_grad()
            out = self.model["b"](self.model["a"](self.model["norm"](batch["x"])))
            if batch["x"].min() == 4:
                step.skip_update()
            else:
                self.descend((out - batch["y"]).pow(2).sum())
            self.average.update_parameters(self.model)

    @property
    def result(self) -> list[Tensor]:
        return [*self.average.parameters(), *self.model.parameters(), *self.model.buffers()]


class Dropped(Skipped):
    """The script sets gradients to zero only after an update, and leaves one out after the backward
    pass."""

    def run(self, number: int, batch: dict[str, Tensor]) -> None:
        with self.session.step() as step:
            out = self.model["b"](self.model["a"](self.model["norm"](batch["x"])))
            (out - batch["y"]).pow(2).sum().backward()
            if number == 2:
                step.skip_update()
            else:
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.average.update_parameters(self.model)


@pytest.mark.parametrize("lost", [0, 3, *map(thorough, (1, 2, 4, 5))])
@pytest.mark.parametrize(
    "kind", [Zeroed, Changed, Streamed, Listed, Averaged, Wrapped, Cached, Skipped, Dropped]
)
def test_a_repeated_step_leads_to_the_same_weights(kind: type[Trained], lost: int) -> None:
    """As if no step had been broken, bit for bit."""
    whole, broken = kind(None), kind(lost)

    assert broken.hooks.votes == whole.hooks.votes + 1
    assert all(map(torch.equal, whole.result, broken.result))
