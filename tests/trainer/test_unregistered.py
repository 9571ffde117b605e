"""A state that steps change is found if the script has not registered it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.trainer.standalone import Voting
from tmd.trainer import Session
from tmd.trainer.state.left_out_optimizers import _state_in
from tmd.trainer.state.state import Registry
from tmd.trainer.state.unregistered import LOOKS, UnregisteredState


class Average:
    """An average of the weights that a script writes itself."""

    def __init__(self, model: nn.Module) -> None:
        self.kept = copy.deepcopy(model)

    def update(self, model: nn.Module) -> None:
        with torch.no_grad():
            for mine, new in zip(self.kept.parameters(), model.parameters(), strict=True):
                mine.data.mul_(0.9).add_(new.data, alpha=0.1)  # as many do, past autograd

    def state_dict(self) -> dict[str, object]:
        return dict(self.kept.state_dict())

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.kept.load_state_dict(state)


class Noting(Voting):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def warn(self, **found: str) -> None:
        self.found += found.values()


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def no_leftovers() -> None:
    """Models of earlier tests that wait for the collector are objects of this process, too."""
    gc.collect()


def run(
    act: Callable[[int], object], *, steps: int = LOOKS[0], model: nn.Module, **others: Any
) -> list[str]:
    """What is found while ``act`` runs after each step of ``model``."""
    optimizer = SGD(model.parameters(), lr=0.1)
    return stepped([optimizer], act, steps=steps, model=model, optimizer=optimizer, **others)


def stepped(
    optimizers: Sequence[Optimizer],
    act: Callable[[int], object] = lambda _: None,
    *,
    model: nn.Module,
    steps: int = LOOKS[0],
    **registered: Any,
) -> list[str]:
    """What is found while each step calls all of ``optimizers``, and ``act`` runs after it."""
    hooks = Noting()
    session = Session(hooks)
    session.register(model=model, **registered)
    for number in session.batches(range(steps)):
        with session.step():
            model.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            for each in optimizers:
                each.step()
        act(number)
    return hooks.found


def test_an_average_of_the_weights_is_found() -> None:
    model = nn.Linear(2, 2)
    average = Average(model)
    (found,) = run(lambda _: average.update(model), model=model)
    assert found.startswith("steps change Linear, which session.register() does not know")


def test_a_registered_average_is_not() -> None:
    """Registered by itself, or as an object that only contains a model."""
    model = nn.Linear(2, 2)
    average, swa = Average(model), AveragedModel(model)

    def update(_: int) -> None:
        average.update(model)
        swa.update_parameters(model)

    assert run(update, model=model, average=average, swa=swa) == []


def test_an_average_of_torch_is_named_by_its_class() -> None:
    model = nn.Linear(2, 2)
    swa = AveragedModel(model)
    (found,) = run(lambda _: swa.update_parameters(model), model=model)
    assert "AveragedModel" in found


def test_the_state_of_a_communication_hook_is_found() -> None:
    """A hook with a process group, or nothing, has none. DDP has one of its own."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        plain, kept = (DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2))
        plain.register_comm_hook(None, default_hooks.allreduce_hook)
        mixed = DistributedDataParallel(nn.Linear(2, 2), mixed_precision=_MixedPrecision())
        state = powerSGD_hook.PowerSGDState(None)
        kept.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        found = [
            UnregisteredState(Registry({"model": m})).committed() for m in (plain, mixed, kept)
        ]
    finally:
        dist.destroy_process_group()

    assert found[:2] == ["", ""]
    assert found[2].startswith("a communication hook of DDP keeps a PowerSGDState, which stays")


def test_a_scheduler_is_found() -> None:
    model = nn.Linear(2, 2)
    scheduler = StepLR(SGD(model.parameters(), lr=0.1), 5)
    (found,) = run(lambda _: (scheduler.optimizer.step(), scheduler.step()), model=model)
    assert "StepLR" in found


@pytest.mark.parametrize("points", ["", "scheduler", "model"])
def test_an_optimizer_of_some_parameters_is_found(points: str) -> None:
    """Without it those parameters lose its steps. Its kind does not matter, nor that it has no
    state, nor that a registered scheduler or model points to it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    forgotten = SGD(model[1].parameters(), lr=0.1)
    more: dict[str, Any] = {}
    if points == "scheduler":
        more["scheduler"] = StepLR(forgotten, 5)
    if points == "model":
        model.optimizer = forgotten  # type: ignore[assignment]
    optimizer = AdamW(model[0].parameters(), lr=0.1)

    (found,) = stepped([forgotten, optimizer], model=model, optimizer=optimizer, **more)
    assert found.startswith("steps run SGD on parameters of the registered model")
    assert "Name each optimizer in register()" in found


class Progress:
    """An object of a script's own that points to its trainer, and saves a number."""

    def __init__(self, trainer: object) -> None:
        self.trainer, self.done = trainer, 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Around:
    """A script's trainer."""

    def __init__(self, optimizer: Optimizer, data: list[int]) -> None:
        self.optimizer, self.data = optimizer, data


def test_an_optimizer_is_found_though_a_registered_object_leads_to_it() -> None:
    """What that saves has nothing of the optimizer's state."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    forgotten, optimizer = (AdamW(each.parameters(), lr=0.1) for each in reversed(model))
    progress = Progress(Around(forgotten, list(range(20_000))))

    (found,) = stepped([forgotten, optimizer], model=model, optimizer=optimizer, progress=progress)
    assert found.startswith("steps run AdamW")


def test_a_watched_optimizer_goes_with_its_last_reference() -> None:
    """The hook holds nothing of the job."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer, forgotten = SGD(model[0].parameters(), lr=0.1), AdamW(model[1].parameters())
    looked = UnregisteredState(Registry({"model": model, "optimizer": optimizer}))
    looked.committed()
    watched, seen = bool(forgotten._optimizer_step_post_hooks), weakref.ref(forgotten)
    del forgotten
    gc.collect()

    assert watched
    assert seen() is None


def test_an_optimizer_that_makes_no_steps_is_not() -> None:
    """An earlier one of the same parameters, or of parameters that the script changes itself, as
    those of a target network."""
    model, target = nn.Linear(2, 2), nn.Linear(2, 2)
    both = nn.Sequential(model, target)
    earlier = AdamW(both.parameters(), lr=0.1)
    target.requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1)

    def follow(_: int) -> None:
        with torch.no_grad():
            target.weight.lerp_(model.weight, 0.1)

    assert stepped([optimizer], follow, model=both, optimizer=optimizer) == []
    del earlier


@pytest.mark.parametrize("copied", [False, True], ids=["itself", "a copy"])
def test_an_optimizer_inside_a_registered_object_is_not(copied: bool) -> None:
    """Its state is saved, or a copy of that."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    inner = AdamW(model[1].parameters(), lr=0.1)
    optimizer = SGD(model[0].parameters(), lr=0.1)
    second = Copying(inner) if copied else Wrapper(inner)
    both = [inner, optimizer]
    assert stepped(both, model=model, optimizer=optimizer, second=second) == []


def with_state(param: torch.Tensor, state: torch.Tensor) -> AdamW:
    optimizer = AdamW([param])
    optimizer.state[param] = {"exp_avg": state}
    return optimizer


def test_a_copy_of_a_state_that_is_divided_among_ranks_is_recognised() -> None:
    """This rank's part of it is saved."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        whole = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
        optimizer = with_state(nn.Parameter(whole), whole)

        assert _state_in(optimizer, [torch.ones(2, 3)])
        assert not _state_in(optimizer, [torch.full((2, 3), 2.0)])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rest", [0.0, 0.5], ids=["all", "first rows"])
def test_zeros_are_no_copy_of_zeros(rest: float) -> None:
    """Such as the row of an embedding that stands for padding, in the weights and in the state."""
    weight, state = torch.full((512, 300), rest), torch.full((512, 300), rest / 2)
    weight[0], state[0] = 0.0, 0.0

    assert not _state_in(with_state(nn.Parameter(weight), state), [weight.clone()])


def test_what_only_looks_like_an_optimizer_hides_nothing() -> None:
    """A wrapper that never calls the constructor of torch's class, say."""
    model = nn.Linear(2, 2)
    average, bare = Average(model), SGD.__new__(SGD)
    (found,) = run(lambda _: average.update(model), model=model)
    assert found.startswith("steps change Linear")
    del bare


class Wrapper:
    """An object of a script's own, around one of torch."""

    def __init__(self, inner: StepLR | AdamW) -> None:
        self.inner = inner

    def state_dict(self) -> dict[str, Any]:
        return dict(self.inner.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


class Copying(Wrapper):
    """It keeps what it returns from changing."""

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(super().state_dict())


def test_schedulers_inside_a_registered_one_are_not_found() -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    parts = [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, 9)]
    warm = SequentialLR(optimizer, parts, milestones=[2])
    own = Wrapper(StepLR(SGD(model.parameters(), lr=0.1), 5))

    def step(_: int) -> None:
        optimizer.step()
        warm.step()
        own.inner.optimizer.step()
        own.inner.step()

    assert run(step, model=model, warm=warm, own=own) == []


class Metric(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))


def test_a_metric_is_not_found() -> None:
    """It has no parameters, and an evaluation begins it anew."""
    model, metric = nn.Linear(2, 2), Metric()
    assert run(lambda _: metric.get_buffer("seen").add_(1), model=model) == []


def test_a_model_that_steps_only_read_is_not_found() -> None:
    model, teacher = nn.Linear(2, 2), nn.Linear(2, 2)
    assert run(lambda _: teacher(torch.ones(1, 2)), model=model) == []


def test_what_begins_to_change_late_is_found_later() -> None:
    """An average is often kept only after some steps, and is reported once."""
    model = nn.Linear(2, 2)
    average = Average(model)
    found = run(
        lambda number: number >= 10 and average.update(model), model=model, steps=LOOKS[1] + 5
    )
    assert len(found) == 1


def test_an_object_that_cannot_be_read_stops_nothing() -> None:
    class Odd(StepLR):
        def state_dict(self) -> dict[str, object]:
            raise OSError("no state")

    model = nn.Linear(2, 2)
    odd = Odd(SGD(model.parameters(), lr=0.1), 5)
    assert run(lambda _: odd.optimizer.step(), model=model) == []


class Unreadable(StepLR):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not now")


class Loose:
    """An object that goes with its last reference."""


def test_an_object_that_cannot_be_read_keeps_no_other_alive() -> None:
    """Not until the next cyclic collection, either: scripts switch that off."""
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    unreadable, loose = Unreadable(optimizer, 1), Loose()
    seen = weakref.ref(loose)
    # It is tracked from its first attribute on.
    loose.__dict__["of"] = unreadable
    looked = UnregisteredState(Registry({"model": model, "optimizer": optimizer}))
    gc.disable()
    try:
        looked.committed()
        del loose
        assert seen() is None
    finally:
        gc.enable()
