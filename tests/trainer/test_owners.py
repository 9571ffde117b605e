"""A script may give an optimizer other parameters while it trains."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from tmd.trainer import Session
from tmd.trainer.session.standalone import StandaloneHooks
from tmd.trainer.state.owners import Owners
from tmd.trainer.state.units import Units


class Job:
    """Two layers of equal size, of which an optimizer has the first."""

    def __init__(self) -> None:
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.optimizer = AdamW(self.first.parameters(), lr=0.1)

    def replace(self) -> None:
        """The second takes the place of the first, as block-wise training does it."""
        self.optimizer.param_groups[0]["params"] = list(self.second.parameters())


def owners_of(optimizer: AdamW) -> Owners:
    made = Owners()
    made.renew([optimizer], [])
    return made


def test_parameters_in_the_place_of_others_are_noticed_between_two_steps() -> None:
    job = Job()
    owners = owners_of(job.optimizer)
    before = owners.by_param
    owners.look()
    unchanged = owners.by_param is before
    job.replace()
    owners.look()

    assert unchanged
    assert set(before) == {id(p) for p in job.first.parameters()}
    assert set(owners.by_param) == {id(p) for p in job.second.parameters()}


def test_one_parameter_in_the_place_of_another_is_noticed() -> None:
    """A script may change the list itself."""
    job = Job()
    owners = owners_of(job.optimizer)
    job.optimizer.param_groups[0]["params"][0] = job.second.weight
    owners.look()

    assert set(owners.by_param) == {id(job.second.weight), id(job.first.bias)}


def test_a_group_that_is_added_is_noticed_at_once() -> None:
    """Also in a step, whose update changes its parameters."""
    job = Job()
    owners = owners_of(job.optimizer)
    job.optimizer.add_param_group({"params": list(job.second.parameters())})

    assert owners.by_param.keys() == owners.owned
    assert len(owners.owned) == 4


def test_a_loop_notices_them_before_a_rank_can_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state that the optimizer has for them is part of their unit."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    job, session = Job(), Session(StandaloneHooks())
    model = nn.ModuleList([job.first, job.second])
    session.register(model=model, optimizer=job.optimizer)
    assert session._registry is not None
    units = Units(session._registry)
    found = []
    for batch in session.batches([torch.ones(1, 2)] * 3):
        found.append(units.of(0))
        with session.step():
            model[1](model[0](batch)).sum().backward()
            job.optimizer.step()
        job.replace()
    layout, tensors = units.collect(2)

    assert found == [[0, 1], [2, 3], [2, 3]]
    assert len(tensors) == 4
    assert "exp_avg" in str(layout)
