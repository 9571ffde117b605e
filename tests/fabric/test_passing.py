"""A group passes its collectives to the inner group of the live generation, and to no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.fabric.circle import Circle, at_once, circle, member, sync
from tmd.core.values.model import Membership
from tmd.fabric import Fabric
from tmd.fabric.generations.generations import Generations
from tmd.fabric.generations.gloo import GlooInner, builder
from tmd.fabric.generations.passing import PassingGroup
from tmd.fabric.generations.states import GenerationState

pytestmark = pytest.mark.timeout(120)

SIZE = 3
SOON_S = 20.0


class Passing:
    """Three ranks whose groups pass to Gloo."""

    def __init__(self, c: Circle) -> None:
        self.circle, self.store = c, dist.HashStore()
        self.groups: dict[str, PassingGroup] = {}
        self.generations: dict[str, Generations] = {}
        for fabric in c.fabrics:
            self.add(fabric)
        self.build(c.membership)
        self.switch(c.membership)

    def add(self, fabric: Fabric) -> None:
        made = Generations(builder(self.store, fabric.worker, Tensor.is_floating_point))
        self.generations[fabric.worker] = made
        self.groups[fabric.worker] = PassingGroup(fabric, "0", range(SIZE), made)

    def build(self, membership: Membership) -> None:
        for each in membership.members:
            group = self.groups[each.worker]
            self.generations[each.worker].prepare([group.view], membership)

    def switch(self, membership: Membership) -> None:
        for each in membership.members:
            assert self.generations[each.worker].wait(SOON_S)
            self.generations[each.worker].switch(membership.epoch)

    def inner(self, fabric: Fabric) -> GlooInner:
        generation = self.generations[fabric.worker].live("0")
        assert generation is not None
        assert isinstance(generation.inner, GlooInner)
        return generation.inner


@contextmanager
def passing() -> Iterator[Passing]:
    with circle(SIZE) as c:
        yield Passing(c)


def allreduce(group: PassingGroup, own: Tensor) -> list[Tensor]:
    group.allreduce([own], sync()).wait()
    return [own]


def broadcast(group: PassingGroup, own: Tensor) -> list[Tensor]:
    opts = dist.BroadcastOptions()
    opts.rootRank = 1
    group.broadcast([own], opts).wait()
    return [own]


def allgather(group: PassingGroup, own: Tensor) -> list[Tensor]:
    found = [torch.empty_like(own) for _ in range(SIZE)]
    group.allgather([found], [own]).wait()
    return found


def all_gather_single(group: PassingGroup, own: Tensor) -> list[Tensor]:
    found = own.new_empty(SIZE * len(own))
    group.all_gather_single(found, own).wait()
    return [found]


def reduce_scatter_single(group: PassingGroup, own: Tensor) -> list[Tensor]:
    found = own.new_empty(len(own) // SIZE)
    group.reduce_scatter_single(found, own, dist.ReduceScatterOptions()).wait()
    return [found]


def all_to_all_single(group: PassingGroup, own: Tensor) -> list[Tensor]:
    found = torch.empty_like(own)
    group.all_to_all_single(found, own, [], [], dist.AllToAllOptions()).wait()
    return [found]


Collective = Callable[[PassingGroup, Tensor], list[Tensor]]
COLLECTIVES: list[Collective] = [
    allreduce,
    broadcast,
    allgather,
    all_gather_single,
    reduce_scatter_single,
    all_to_all_single,
]


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda each: each.__name__)
def test_both_ways_have_the_same_result(collective: Collective) -> None:
    """Floats go to Gloo and integers to tmd's own algorithms."""
    with passing() as p:

        def run(fabric: Fabric, dtype: torch.dtype) -> list[Tensor]:
            rank = p.circle.fabrics.index(fabric)
            own = (torch.arange(6) + 10 * rank).to(dtype)
            return [each.to(torch.int64) for each in collective(p.groups[fabric.worker], own)]

        before = [fabric.counters.bytes for fabric in p.circle.fabrics]
        by_gloo = p.circle.each(lambda fabric: run(fabric, torch.float32))
        assert [fabric.counters.bytes for fabric in p.circle.fabrics] == before, "it used its links"
        by_tmd = p.circle.each(lambda fabric: run(fabric, torch.int64))
        assert [fabric.counters.bytes for fabric in p.circle.fabrics] != before

        for ours, theirs in zip(by_tmd, by_gloo, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_ddp_goes_on_in_the_next_generation() -> None:
    """It was built while the previous one trained, and one member is another worker."""
    with passing() as p:
        old = list(p.circle.fabrics)
        joiner = p.circle.standby("joiner", rank=2)
        p.add(joiner)
        members = (*(member(f) for f in old[:2]), member(joiner))
        later = Membership(epoch=2, members=members)

        def model_of(fabric: Fabric) -> DistributedDataParallel:
            torch.manual_seed(0)
            return DistributedDataParallel(nn.Linear(4, 4), process_group=p.groups[fabric.worker])

        models = dict(
            zip([f.worker for f in old], p.circle.each(model_of), strict=True),
            joiner=model_of(joiner),  # in the sandbox: it communicates with no one
        )

        def gradient(fabric: Fabric, rank: int) -> Tensor:
            model = models[fabric.worker]
            model.zero_grad()
            model(torch.full((1, 4), float(rank + 1))).sum().backward()
            grad = model.module.weight.grad
            assert isinstance(grad, Tensor)
            return grad.clone()

        expected = torch.full((4, 4), 2.0)  # the mean of the ranks' inputs
        p.build(later)
        for step in range(2):
            found = at_once([lambda f=f, r=r: gradient(f, r) for r, f in enumerate(old)])
            assert all(torch.equal(each, expected) for each in found), f"step {step}"
            gradient(joiner, 2)  # DDP settles the order of its gradients in the first step

        inner = p.inner(old[0])
        p.switch(later)
        new = [*old[:2], joiner]
        old[2].switch(later, None)
        at_once([lambda f=f, r=r: f.switch(later, r) for r, f in enumerate(new[:2])])
        joiner.enter(later, 2)
        assert p.inner(old[0]) is not inner
        found = at_once([lambda f=f, r=r: gradient(f, r) for r, f in enumerate(new)])
        assert all(torch.equal(each, expected) for each in found)
        p.generations[old[0].worker].reap()
        assert inner.closed


def test_a_sandbox_calls_no_inner_group() -> None:
    with passing() as p:
        fabric = p.circle.fabrics[0]
        fabric.switch(p.circle.membership, None)
        (own,) = allreduce(p.groups[fabric.worker], torch.ones(2))
        assert own.tolist() == [1.0, 1.0], "the neutral result; Gloo would wait for the others"


def test_calls_of_an_aborted_generation_complete_without_a_result() -> None:
    """The step that made them is dropped; nothing may raise or wait in it."""
    with passing() as p:
        fabric = p.circle.fabrics[0]
        own = torch.ones(2)
        assert p.generations[fabric.worker].abort(SOON_S) == ()
        generation = p.generations[fabric.worker].live("0")
        assert generation is not None
        assert generation.state is GenerationState.ABORTED
        work = p.groups[fabric.worker].allreduce([own])
        assert work.wait()
        (value,) = work.get_future().wait()
        assert value is own


def test_an_error_of_the_inner_group_reaches_the_caller() -> None:
    """While the generation is live it is a mistake of the script."""
    with passing() as p:
        group = p.groups[p.circle.fabrics[0].worker]
        with pytest.raises((RuntimeError, ValueError), match=r"(?i)invalid|size|must"):
            group.allgather([[torch.ones(2)] * (SIZE + 1)], [torch.ones(2)])


def test_no_call_waits_for_a_lock_that_an_abort_holds() -> None:
    """An abort may hang; calls of other threads complete meanwhile."""
    with passing() as p:
        fabric = p.circle.fabrics[0]
        inner, released = p.inner(fabric), threading.Event()
        inner.abort = released.wait  # type: ignore[method-assign,assignment]
        try:
            assert p.generations[fabric.worker].abort(0.01) == ("0",)
            assert p.groups[fabric.worker].allreduce([torch.ones(2)]).wait()
        finally:
            released.set()
