"""Callbacks of futures: they may call collectives, and all ranks call those in the same order."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from tests.fabric.circle import Circle, circle, sync
from tests.fabric.test_passing import passing
from tests.fabric.test_sandbox import Recorder
from tmd.fabric import Fabric, Group

pytestmark = pytest.mark.timeout(60)

LENGTH = 4


def total(size: int) -> float:
    return float(sum(range(1, size + 1)))


def own(fabric: Fabric, length: int = LENGTH) -> Tensor:
    return torch.full((length,), float((fabric.rank or 0) + 1))


def in_callbacks(fabric: Fabric, group: Group, attached: threading.Event) -> list[Tensor]:
    """As torch's PowerSGD hook does: the callback of an operation runs the next one.

    Rank 1 is late, so that the others attach theirs before the operation is complete.
    """
    if fabric.rank == 1:
        attached.wait()

    def next_one(future: Future[list[Tensor]]) -> Tensor:
        (first,) = future.value()
        return group.allreduce([first.clone()]).get_future().wait()[0]

    chained = group.allreduce([own(fabric)]).get_future().then(next_one)
    if fabric.rank == 0:
        attached.set()
    # Longer than the callback's: out of step if the order differed between the ranks.
    later = own(fabric, 3 * LENGTH)
    group.allreduce([later], sync()).wait()
    return [chained.wait(), later]


def is_sum(tensors: list[Tensor], size: int) -> None:
    chained, later = tensors
    assert torch.equal(chained, torch.full((LENGTH,), size * total(size)))
    assert torch.equal(later, torch.full((3 * LENGTH,), total(size)))


def on_two(attach: Callable[[Group, Fabric], Future[Tensor]]) -> list[Tensor]:
    """The results on two ranks. Rank 1 is late: the callbacks of rank 0 are attached by then."""
    attached = threading.Event()

    def one(c: Circle, fabric: Fabric) -> Tensor:
        if fabric.rank == 1:
            attached.wait()
        chained = attach(c.of(fabric), fabric)
        attached.set()
        return chained.wait()

    with circle(2) as c:
        c.group()
        return c.each(lambda f: one(c, f))


def test_a_callback_runs_the_next_collective_before_those_that_follow() -> None:
    with circle(3) as c:
        c.group()
        attached = threading.Event()
        for found in c.each(lambda f: in_callbacks(f, c.of(f), attached)):
            is_sum(found, 3)
        assert not any(f.poisoned for f in c.fabrics)


def test_so_it_does_while_a_shadow_follows_an_inner_group() -> None:
    with passing() as p:
        p.circle.each(p.inner)
        for fabric in p.circle.fabrics:
            fabric.tap = Recorder()
        attached = threading.Event()
        for found in p.circle.each(lambda f: in_callbacks(f, p.groups[f.worker], attached)):
            is_sum(found, 3)
        assert not any(f.poisoned for f in p.circle.fabrics)


def test_a_callback_may_wait_for_one_that_it_attaches() -> None:
    def attach(group: Group, fabric: Fabric) -> Future[Tensor]:
        def outer(future: Future[list[Tensor]]) -> Tensor:
            inner = group.allreduce([future.value()[0].clone()]).get_future()
            return inner.then(lambda done: done.value()[0] + 1).wait()

        return group.allreduce([own(fabric)]).get_future().then(outer)

    for found in on_two(attach):
        assert torch.equal(found, torch.full((LENGTH,), 2 * total(2) + 1))


def test_no_collective_waits_for_the_callback_of_a_message() -> None:
    """The message is sent only after it."""

    def one(c: Circle, fabric: Fabric) -> Tensor | None:
        group = c.of(fabric)
        if fabric.rank == 0:
            got = group.recv([torch.zeros(LENGTH)], 1).get_future().then(lambda f: f.value()[0] + 1)
            group.allreduce([own(fabric)], sync()).wait()
            return got.wait()
        group.allreduce([own(fabric)], sync()).wait()
        group.send([own(fabric)], 0).wait()
        return None

    with circle(2) as c:
        c.group()
        found, _ = c.each(lambda f: one(c, f))
        assert torch.equal(found, torch.full((LENGTH,), 3.0))


def test_a_callback_of_a_coalesced_block_may_call_a_collective() -> None:
    def attach(group: Group, fabric: Fabric) -> Future[Tensor]:
        group._start_coalescing(torch.device("cpu"))
        for _ in range(2):
            group.allreduce([own(fabric)])
        joint = group._end_coalescing(torch.device("cpu")).get_future()

        def next_one(future: Future[list[Tensor]]) -> Tensor:
            return group.allreduce([future.value()[1].clone()]).get_future().wait()[0]

        return joint.then(next_one)

    for found in on_two(attach):
        assert torch.equal(found, torch.full((LENGTH,), 2 * total(2)))


def test_no_collective_waits_for_the_callback_of_another_group() -> None:
    """The ranks may call the operations of two groups in another order."""

    def one(c: Circle, fabric: Fabric) -> Tensor:
        first, other = c.of(fabric, "0"), c.of(fabric, "1")
        if fabric.rank == 0:
            chained = first.allreduce([own(fabric)]).get_future().then(lambda f: f.value()[0] + 1)
            other.allreduce([own(fabric)], sync()).wait()
            return chained.wait()
        other.allreduce([own(fabric)], sync()).wait()
        last = own(fabric)
        first.allreduce([last], sync()).wait()
        return last + 1

    with circle(2) as c:
        c.group("0")
        c.group("1")
        for found in c.each(lambda f: one(c, f)):
            assert torch.equal(found, torch.full((LENGTH,), total(2) + 1))
        assert not any(f.poisoned for f in c.fabrics)


def test_the_hooks_of_ddp_that_call_nothing_are_not_waited_for() -> None:
    """DDP would lose the overlap of communication and computation. Here rank 1 calls nothing before
    rank 0 has called both."""
    called = threading.Event()

    def one(c: Circle, fabric: Fabric) -> list[Tensor]:
        group = c.of(fabric)
        if fabric.rank == 1:
            called.wait()
        chained = []
        for _ in range(2):

            def decompress(future: Future[list[Tensor]]) -> Tensor:
                return future.value()[0] + 1

            decompress.__module__ = default_hooks.__name__
            chained.append(group.allreduce([own(fabric)]).get_future().then(decompress))
        called.set()
        return [each.wait() for each in chained]

    with circle(2) as c:
        c.group()
        for found in c.each(lambda f: one(c, f)):
            assert all(torch.equal(each, torch.full((LENGTH,), total(2) + 1)) for each in found)


def test_callbacks_of_a_broken_operation_run_too() -> None:
    with circle(2) as c:
        c.group()
        fabric = c.fabrics[0]
        ran = threading.Event()
        future = c.of(fabric).allreduce([own(fabric)]).get_future()
        future.add_done_callback(lambda _: ran.set())
        fabric.poison("a peer was lost")

        assert ran.wait(20)
        c.of(fabric).allreduce([own(fabric)], sync()).wait()
