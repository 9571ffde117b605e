"""A script is warned that writes to the state of an optimizer before the vote."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tmd.trainer.state.local import LocalState
from tmd.trainer.state.state import Registry

State = dict[str, object]


def advanced(state: State) -> None:
    momentum = state["exp_avg"]
    assert isinstance(momentum, torch.Tensor)
    momentum.mul_(0.9)


def made(state: State) -> None:
    """As SAM makes its perturbation in each step."""
    state["e_w"] = torch.ones(2)


def moved(state: State) -> None:
    """As from the memory of the host to a device."""
    momentum = state["exp_avg"]
    assert isinstance(momentum, torch.Tensor)
    state["exp_avg"] = momentum.clone()


class Job:
    """Steps of Adam; ``before`` runs in them between the backward pass and the vote."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 1, bias=False)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.local = LocalState(Registry({"model": self.model, "optimizer": self.optimizer}))

    @property
    def state(self) -> State:
        return self.optimizer.state[self.model.weight]

    def step(self, before: Callable[[State], object] = lambda _: None) -> None:
        self.local.begin()
        self.model(torch.ones(1, 2)).sum().backward()
        before(self.state)
        self.local.at_vote()
        self.optimizer.step()


@pytest.mark.parametrize(("change", "warnings"), [(advanced, 1), (made, 0), (moved, 0)])
def test_what_a_repeat_would_change_a_second_time_is_named_once(
    change: Callable[[State], None], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job()
    job.step()
    for _ in range(3):
        job.step(change)

    named = [each for each in caplog.messages if "writes to the state of Adam ('exp_avg')" in each]
    assert len(named) == warnings


def test_a_state_that_step_changes_is_none_of_its_business(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor one that another worker has sent, which is put in place between two steps or in one."""
    job = Job()
    for _ in range(2):
        job.step()
    advanced(job.state)
    job.local.begin()
    job.local.start.placed = True
    advanced(job.state)
    job.local.at_vote()
    job.optimizer.step()

    assert job.state["step"] == 3
    assert "writes to the state" not in caplog.text
