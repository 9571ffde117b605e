"""Registered objects that are neither modules nor optimizers, and whose state has tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.trainer.moves import Worker, moved
from tmd.core.values.errors import StateMismatch

pytestmark = pytest.mark.timeout(60)


class Average:
    """Hands out copies, as most averages of weights do."""

    def __init__(self, value: int) -> None:
        self.shadow = {"w": torch.full((3,), float(value)), "b": torch.full((70_000,), value)}

    def state_dict(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.shadow.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = {name: value.clone() for name, value in state.items()}


class Draws:
    """A generator, whose state is a copy as well."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["rng"])


class Meter:
    """Keeps a number and saves a tensor."""

    def __init__(self, total: int) -> None:
        self.total = float(total)

    def state_dict(self) -> dict[str, Any]:
        return {"total": torch.tensor(self.total), "name": "loss"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = float(state["total"])


class Own:
    """Hands out its own tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value if isinstance(value, Tensor) else torch.full((3,), float(value))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Partial(Meter):
    """Takes less than it returns."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Clearing(Own):
    """Spoils what it is given, if that is its own tensor."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value.zero_().add_(state["value"])


def values(made: Any) -> list[Tensor]:
    return [value for value in made.state_dict().values() if isinstance(value, Tensor)]


MAKES = [Average, Draws, Meter, Own]


@pytest.mark.parametrize("make", MAKES)
def test_it_arrives_although_its_state_may_be_a_copy(make: type[Any]) -> None:
    """Whether it hands out its tensors or copies of these; layouts are equal on both sides."""
    source, joiner = make(5), make(2)
    moved(
        Worker(nn.Linear(2, 2), other=source),
        Worker(nn.Linear(2, 2), other=joiner),
    )

    assert all(map(torch.equal, values(source), values(joiner)))


@pytest.mark.parametrize("make", MAKES)
def test_it_outlives_what_is_built_around_it(make: type[Any]) -> None:
    before, after = make(5), make(2)
    Worker(nn.Linear(2, 2), other=before).rebuild(nn.Linear(2, 2), other=after)

    assert all(map(torch.equal, values(before), values(after)))


def test_what_hands_out_its_own_tensor_keeps_it() -> None:
    """Something else may refer to it, and there may be no room for a second one."""
    source, joiner = Own(5), Own(2)
    own = joiner.value
    moved(
        Worker(nn.Linear(2, 2), other=source),
        Worker(nn.Linear(2, 2), other=joiner),
    )

    assert joiner.value.data_ptr() == own.data_ptr()


@pytest.mark.parametrize(("make", "path"), [(Partial, "other.total"), (Clearing, "other.value")])
def test_what_does_not_take_what_it_is_given_is_refused(make: type[Any], path: str) -> None:
    """Its rank would go on with other values, and nothing would show it."""
    workers = [Worker(nn.Linear(2, 2), other=make(value)) for value in (5, 2)]

    with pytest.raises(StateMismatch) as refusal:
        moved(*workers)

    assert str(refusal.value).startswith(
        f"{path} is not what {make.__name__}.load_state_dict() was given: let load_state_dict() "
    )


@contextmanager
def alone() -> Iterator[None]:
    """A group of one rank, which sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


def test_a_distributed_tensor_is_loaded_as_one() -> None:
    """Only its part moves. The object would otherwise mix tensors of both kinds."""
    with alone():
        mesh = init_device_mesh("cpu", (2,))
        made = [
            Own(DTensor.from_local(torch.full((2, 3), value), mesh, [Shard(0)], run_check=False))
            for value in (5.0, 2.0)
        ]
        moved(*(Worker(nn.Linear(2, 2), other=each) for each in made))

        assert isinstance(made[1].value, DTensor)
        assert made[1].value.shape == (4, 3)
        assert torch.equal(made[1].value.to_local(), torch.full((2, 3), 5.0))
