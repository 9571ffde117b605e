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
