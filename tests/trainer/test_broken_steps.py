"""A step that is broken and repeated leads to the same weights, whatever the script does in it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

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


class Streamed(Changed):
    """And the batches come from a generator, which cannot be iterated again."""

    def loader(self, batches: Any) -> Any:
        return (batch for batch in batches)


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


class Caught(Trained):
    """One batch fails after its forward pass, on all ranks alike, and the script goes on."""

    count = STEPS + 1

    def others(self) -> dict[str, Any]:
        self.model["norm"] = nn.BatchNorm1d(2)
        return {}

    def sample(self, number: int) -> dict[str, Tensor]:
        return {"x": torch.full((2,), float(number)), "y": torch.zeros(2)}

    def run(self, number: int, batch: dict[str, Tensor]) -> None:
        with suppress(FloatingPointError):
            super().run(number, batch)

    def step(self, number: int, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        out = self.model["b"](self.model["a"](self.model["norm"](batch["x"])))
        if batch["x"].min() == 4:
            raise FloatingPointError
        self.descend((out - batch["y"]).pow(2).sum())

    @property
    def result(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]


class Reloaded(Caught):
    """And loads other weights for that."""

    def run(self, number: int, batch: dict[str, Tensor]) -> None:
        super().run(number, batch)
        if batch["x"].min() == 4:
            with torch.no_grad():
                for param in self.model.parameters():
                    param.mul_(0.5)


class Late(Caught):
    """It fails after the optimizer has run: the step counts."""

    count = STEPS

    def step(self, number: int, batch: dict[str, Tensor]) -> None:
        self.optimizer.zero_grad()
        out = self.model["b"](self.model["a"](self.model["norm"](batch["x"])))
        self.descend((out - batch["y"]).pow(2).sum())
        if batch["x"].min() == 4:
            raise FloatingPointError


@pytest.mark.parametrize("lost", range(STEPS))
@pytest.mark.parametrize(
    "kind", [Zeroed, Changed, Streamed, Listed, Averaged, Cached, Caught, Late]
)
def test_a_repeated_step_leads_to_the_same_weights(kind: type[Trained], lost: int) -> None:
    """As if no step had been broken, bit for bit."""
    whole, broken = kind(None), kind(lost)

    assert broken.hooks.votes == whole.hooks.votes + 1
    assert all(map(torch.equal, whole.result, broken.result))


@pytest.mark.parametrize("lost", range(STEPS))
def test_a_script_may_change_weights_once_a_step_has_failed(lost: int) -> None:
    """No worker ends for that, though nobody undoes it."""
    assert Reloaded(lost).hooks.votes == STEPS + 1


@pytest.mark.parametrize("lost", [None, 0, 1, 2])
def test_what_follows_a_call_whose_last_batch_has_failed_is_not_undone(lost: int | None) -> None:
    """That batch does not come again."""
    hooks = Voting()
    hooks.lost = set() if lost is None else {lost}
    session, model = Session(hooks), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    session.register(model=model, optimizer=optimizer, schedule=schedule)
    evaluate = session.repeatable(lambda: None, name="evaluate")
    found = []
    for _ in range(2):
        for batch in session.batches([1.0, 2.0]):
            with suppress(FloatingPointError), session.step():
                model(torch.tensor([batch])).sum().backward()
                if batch == 2.0:
                    raise FloatingPointError
                optimizer.step()
            found.append(optimizer.param_groups[0]["lr"])
        schedule.step()
        evaluate()

    assert hooks.votes == (4 if lost is None else 5)
    assert found[-2:] == [0.5, 0.5]
    assert optimizer.param_groups[0]["lr"] == 0.25
