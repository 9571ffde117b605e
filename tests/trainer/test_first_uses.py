"""Whether a step is the first in which a DDP module reduces gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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

    def run(self, module: nn.Module) -> tuple[bool, bool]:
        self.uses.begin()
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


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "order", ["evaluation last", "evaluation between", "no_sync last", "early"]
)
def test_a_use_is_noticed_whatever_else_the_step_runs(order: str, compiled: bool) -> None:
    """Other passes of the module, or its forward pass before the step begins."""
    module = DistributedDataParallel(nn.Linear(2, 2))
    run = torch.compile(module, backend="eager") if compiled else module
    uses = FirstUses([module])
    if order == "early":
        loss = run(X).sum()
        uses.begin()
    else:
        uses.begin()
        loss = run(X).sum()
    if order == "evaluation between":
        with torch.no_grad():
            run(X)
    loss.backward()
    if order == "evaluation last":
        with torch.no_grad():
            run(X)
    if order == "no_sync last":
        with module.no_sync():
            run(X).sum().backward()

    assert uses.now


def test_a_module_that_never_settles_is_given_up() -> None:
    """Its rank would otherwise ask for a repetition for ever."""
    module = DistributedDataParallel(nn.Linear(2, 2))
    steps = Steps(module)
    found = []
    for _ in range(TRIES + 2):
        found.append(steps.run(module)[0])
        module._has_rebuilt_buckets = False  # torch sets it in the second step only

    assert found == [True, False, *[True] * (TRIES - 1), False]


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
