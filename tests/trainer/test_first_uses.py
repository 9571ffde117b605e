"""Whether a step is the first in which a DDP module reduces gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tmd.torch_private import ddp
from tmd.trainer.state.first_uses import TRIES, FirstUses
from tmd.trainer.state.state import Registry

X = torch.ones(1, 2)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Steps:
    def __init__(self, *modules: DistributedDataParallel) -> None:
        self.uses = FirstUses(modules)
        self._modules = modules

    def begin(self) -> None:
        self.uses.begin()
        for each in self._modules:
            ddp.await_forward(each)

    def run(self, module: nn.Module) -> tuple[bool, bool]:
        self.begin()
        module(X).sum().backward()
        return self.uses.now, self.uses.unsettled


def test_a_module_settles_in_the_step_after_its_first_use() -> None:
    """One that trains later has a first use of its own."""
    first, later = (DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2))
    steps = Steps(first, later)
    found = [steps.run(module) for module in (first, first, first, later, first, later, later)]

    new, settles, old = (True, True), (False, True), (False, False)
    assert found == [new, settles, old, new, old, settles, old]


def test_a_backward_pass_in_which_a_module_takes_no_part_is_no_use() -> None:
    """Of a module that it shares parameters with, or of the module inside."""
    trunk = nn.Linear(2, 2)
    one, other = DistributedDataParallel(trunk), DistributedDataParallel(trunk)
    steps = Steps(one, other)
    found = [steps.run(module) for module in (one, one, one, other.module)]
    with other.no_sync():
        found.append(steps.run(other))

    assert found == [(True, True), (False, True), *[(False, False)] * 3]


def test_a_module_that_never_settles_is_given_up() -> None:
    """Its rank would otherwise ask for a repetition for ever."""
    module = DistributedDataParallel(nn.Linear(2, 2))
    steps = Steps(module)
    found = []
    for _ in range(TRIES + 1):
        steps.begin()
        module(X).sum().backward()
        module._has_rebuilt_buckets = False
        found.append(steps.uses.now)

    assert found == [True] * TRIES + [False]


def test_modules_that_replace_others_are_watched() -> None:
    """And hooks on the parameters of those before are gone."""
    old, new = (DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2))
    registry = Registry({"model": old})
    uses = FirstUses(registry.wrappers)
    registry.renew({"model": new})
    uses.renew()
    uses.begin()
    new(X).sum().backward()

    assert uses.now
    assert not old.module.weight._post_accumulate_grad_hooks
