"""The state of an optimizer changes after the vote, or the script is refused in its first steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tmd.trainer.state.local import LocalState
from tmd.trainer.state.state import Registry

State = dict[str, object]


def made(state: State) -> None:
    state["update"] = torch.ones(2)


def advanced(state: State) -> None:
    momentum = state["exp_avg"]
    assert isinstance(momentum, torch.Tensor)
    momentum.mul_(0.9)


def counted(state: State) -> None:
    state["calls"] = 1


class Job:
    """Steps of Adam; ``before`` runs in them between the backward pass and the vote."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 1, bias=False)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.local = LocalState(Registry({"model": self.model, "optimizer": self.optimizer}))

    def step(self, before: Callable[[State], object] = lambda _: None) -> None:
        self.local.begin()
        self.model(torch.ones(1, 2)).sum().backward()
        before(self.optimizer.state[self.model.weight])
        self.local.at_vote()
        self.optimizer.step()


@pytest.mark.parametrize("change", [made, advanced, counted])
def test_a_state_that_changes_before_the_vote_is_refused(change: Callable[[State], None]) -> None:
    job = Job()
    job.step()

    with pytest.raises(RuntimeError, match=r"the state of Adam \('\w+'\) changes in a step"):
        job.step(change)


def test_a_state_that_step_changes_is_none_of_its_business() -> None:
    """Nor one that another worker has sent, which is put in place between two steps or in one."""
    job = Job()
    for _ in range(2):
        job.step()
    advanced(job.optimizer.state[job.model.weight])
    job.local.begin()
    job.local.start.placed = True
    advanced(job.optimizer.state[job.model.weight])
    job.local.at_vote()
    job.optimizer.step()
    job.step()

    assert job.optimizer.state[job.model.weight]["step"] == 4
