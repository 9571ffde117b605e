"""The optimizers inside those of Megatron are found, or refused by name.

Megatron-LM needs a GPU and is not installed with the tests. The classes here have the attributes
and the order of calls of its own: a chain that calls its members in turn, and members that each
have an optimizer of torch and a step of two parts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from tests.trainer.standalone import Voting
from tmd.trainer import Session
from tmd.trainer.state.state import Registry


class FP32Optimizer:
    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer

    def prepare_grads(self) -> bool:
        return False

    def step_with_ready_grads(self) -> bool:
        if self.optimizer is not None:
            self.optimizer.step()
        return True


class Float16OptimizerWithFloat16Params(FP32Optimizer):
    def __init__(self, optimizer: torch.optim.Optimizer, **keeps: object) -> None:
        super().__init__(optimizer)
        vars(self).update({"grad_scaler": None, **keeps})


class DistributedOptimizer(FP32Optimizer):
    pass


class ChainedOptimizer:
    """Like Megatron's it has no ``optimizer`` of its own."""

    def __init__(self, chained: list[Any]) -> None:
        self.chained_optimizers = chained

    def prepare_grads(self) -> bool:
        return sum(each.prepare_grads() for each in self.chained_optimizers) > 0

    def step_with_ready_grads(self) -> bool:
        return min(each.step_with_ready_grads() for each in self.chained_optimizers)

    def step(self) -> bool:
        return not self.prepare_grads() and self.step_with_ready_grads()

    def state_dict(self) -> list[Any]:
        return [each.optimizer.state_dict() for each in self.chained_optimizers]

    def load_state_dict(self, state: list[Any]) -> None:
        for each, values in zip(self.chained_optimizers, state, strict=True):
            each.optimizer.load_state_dict(values)


class LayerWiseDistributedOptimizer(ChainedOptimizer):
    pass


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)


def parts() -> tuple[nn.Module, SGD, Adam]:
    """A model of two layers and an optimizer for each, as dense layers and experts have."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    return model, SGD(model[0].parameters(), lr=0.1), Adam(model[1].parameters(), lr=0.1)


def test_a_chain_of_megatron_votes_once_in_each_step() -> None:
    """Before this the first step failed, since no registered optimizer ran in it."""
    hooks = Voting()
    model, dense, expert = parts()
    chain = ChainedOptimizer([FP32Optimizer(dense), FP32Optimizer(expert)])
    session = Session(hooks)
    session.register(model=model, optimizer=chain)

    for _ in session.batches(range(2)):
        with session.step() as step:
            model(torch.ones(1, 2)).sum().backward()
            chain.step()
        assert step.counts

    assert hooks.seen == ["vote", "apply", "apply"] * 2


def test_the_state_of_all_members_moves() -> None:
    """Nested chains and a member without parameters, which a rank of frozen layers has."""

    def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [t for kept in optimizer.state.values() for t in kept.values()]

    model, dense, expert = parts()
    nested = ChainedOptimizer([FP32Optimizer(expert), FP32Optimizer(None)])
    chain = ChainedOptimizer([FP32Optimizer(dense), nested])
    model(torch.ones(1, 2)).sum().backward()
    chain.step()

    registry = Registry({"model": model, "optimizer": chain})

    assert registry.optimizers == [dense, expert]
    moved = {t.data_ptr() for t in registry.collect()[1]}
    assert {t.data_ptr() for t in state_of(expert)} <= moved
    assert list(registry.named) == ["model", "optimizer[0]", "optimizer[1]"]


def test_a_single_optimizer_of_megatron_is_unwrapped() -> None:
    model, dense, _ = parts()
    assert Registry({"model": model, "optimizer": FP32Optimizer(dense)}).optimizers == [dense]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda o: ChainedOptimizer([FP32Optimizer(None)]), "ChainedOptimizer has no optimizer"),
        (lambda o: DistributedOptimizer(o), "DistributedOptimizer divides its state"),
        (
            lambda o: LayerWiseDistributedOptimizer([FP32Optimizer(o)]),
            "LayerWiseDistributedOptimizer divides its state",
        ),
        (
            lambda o: Float16OptimizerWithFloat16Params(o, grad_scaler=SimpleNamespace()),
            "Float16OptimizerWithFloat16Params keeps a loss scale",
        ),
        (
            lambda o: Float16OptimizerWithFloat16Params(
                o, fp32_from_float16_groups=[[], [torch.ones(2)]]
            ),
            "Float16OptimizerWithFloat16Params keeps a loss scale",
        ),
        (lambda o: ChainedOptimizer([SimpleNamespace(optimizer=o)]), "SimpleNamespace in chained"),
    ],
)
def test_what_cannot_be_unwrapped_is_refused_by_name(wrong: Any, named: str) -> None:
    """Each of them has a state that is in no optimizer of torch, or is divided."""
    model, dense, _ = parts()
    with pytest.raises(TypeError, match=named):
        Registry({"model": model, "optimizer": wrong(dense)})
