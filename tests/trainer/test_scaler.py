"""A registered GradScaler is still the script's own: it can be copied, pickled and derived from."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tmd.trainer.session.optimizers import OptimizerHooks, Stage
from tmd.trainer.state.state import Registry


class Own(torch.amp.GradScaler):
    """A scaler of the script."""

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        return super().step(optimizer, *args, **kwargs)


class Job:
    """A scaler that overflows in each step, so that only its hook votes."""

    def __init__(self, kind: Callable[..., torch.amp.GradScaler]) -> None:
        self.scaler = kind("cpu", init_scale=1024.0)
        self.model = nn.Linear(1, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.votes = 0
        self.hooks = OptimizerHooks(self.vote, lambda _: None, lambda: 0, lambda: Stage.COMPUTING)
        self.attach()

    def vote(self) -> None:
        self.votes += 1

    def attach(self) -> None:
        self.hooks.attach([], [], [self.scaler])

    def step(self, scaler: torch.amp.GradScaler) -> None:
        scaler.scale(self.model(torch.full((1,), float("inf"))).sum()).backward()
        scaler.step(self.optimizer)
        scaler.update()


@pytest.fixture(params=[torch.amp.GradScaler, Own])
def job(request: pytest.FixtureRequest) -> Job:
    return Job(request.param)


COPIES: list[Callable[[torch.amp.GradScaler], torch.amp.GradScaler]] = [
    copy.copy,
    copy.deepcopy,
    lambda scaler: pickle.loads(pickle.dumps(scaler)),
]


@pytest.mark.parametrize("copied", COPIES, ids=["copy", "deepcopy", "pickle"])
def test_a_copy_is_of_the_same_class_and_steps_itself(
    job: Job, copied: Callable[[torch.amp.GradScaler], torch.amp.GradScaler]
) -> None:
    """Not the registered one, whose scale would be halved instead, and no vote begins."""
    found = copied(job.scaler)
    job.step(found)

    assert type(found) is type(job.scaler)
    assert job.votes == 0
    assert (job.scaler.get_scale(), found.get_scale()) == (1024.0, 512.0)


def test_a_scaler_that_is_registered_again_has_one_hook(job: Job) -> None:
    """As after a rebuild: the objects registered before must not vote, too."""
    for _ in range(3):
        job.attach()
    job.step(job.scaler)

    assert job.votes == 1


def test_other_scalers_have_no_hook(job: Job) -> None:
    """All have the same class."""
    other = Job(type(job.scaler))
    other.step(other.scaler)

    assert (job.votes, other.votes) == (0, 1)


def test_a_collective_after_a_skipped_optimizer_is_noticed_by_the_next_one() -> None:
    """The scaler has voted: a rank that is lost in the collective would leave garbage."""
    calls, scaler = [0], torch.amp.GradScaler("cpu", init_scale=1024.0)
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    hooks = OptimizerHooks(lambda: None, lambda _: None, lambda: calls[0], lambda: Stage.COMPUTING)
    hooks.attach(optimizers, optimizers, [scaler])
    hooks.begin()
    scaler.scale(models[0](torch.full((1,), float("inf"))).sum()).backward()
    scaler.step(optimizers[0])
    calls[0] += 1
    scaler.scale(models[1](torch.ones(1)).sum()).backward()

    with pytest.raises(RuntimeError, match="another optimizer of the same step"):
        scaler.step(optimizers[1])


AT_EXIT = """
import torch
from torch import nn
from tmd.trainer.session.optimizers import OptimizerHooks, Stage
from tmd.trainer.state.state import Registry
hooks = OptimizerHooks(lambda: None, lambda _: None, lambda: 0, lambda: Stage.COMPUTING)
scaler = torch.amp.GradScaler("cpu")
hooks.attach([], [], [scaler])
"""


def test_a_script_with_a_scaler_ends_without_a_word() -> None:
    """Both may live until the interpreter ends, as in a script without functions."""
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=50, check=True
    )

    assert done.stderr == ""


class Engine:
    """Holds a scaler, and has a state."""

    def __init__(self, enabled: bool, state: Callable[[torch.amp.GradScaler], object]) -> None:
        self.scaler, self._state = torch.amp.GradScaler("cpu", enabled=enabled), state

    def state_dict(self) -> dict[str, Any]:
        return {"step": 3, "more": self._state(self.scaler)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state["more"])


def test_a_scaler_inside_an_object_is_found() -> None:
    """Its state is that of the object, and no second one."""
    registry = Registry({"engine": Engine(True, lambda scaler: scaler.state_dict())})

    assert len(registry.scalers) == len(registry.others) == 1


@pytest.mark.parametrize(("enabled", "named"), [(False, False), (True, True)])
def test_a_scaler_whose_state_is_elsewhere_may_be_in_an_object(enabled: bool, named: bool) -> None:
    """It is registered itself, or has none."""
    engine = Engine(enabled, lambda scaler: None)
    registry = Registry({"engine": engine, **({"scaler": engine.scaler} if named else {})})

    assert len(registry.scalers) == 1


def test_a_scaler_that_would_stay_behind_is_refused() -> None:
    with pytest.raises(TypeError, match=r"the GradScaler in the Engine is not in its state_dict"):
        Registry({"engine": Engine(True, lambda scaler: None)})
