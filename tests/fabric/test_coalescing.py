"""Blocks of operations that torch waits for as one, and blocks that an exception leaves."""

from __future__ import annotations

import gc
import threading
import weakref

import torch

from tests.fabric.circle import Circle, circle, sync
from tmd.fabric import Fabric, Group

CPU = torch.device("cpu")


def begun(group: Group) -> weakref.ref[torch.Tensor]:
    """A completed operation; returns whether its tensor is kept."""
    tensor = torch.ones(8)
    group.allreduce([tensor], sync()).wait()
    return weakref.ref(tensor)


def kept(tensor: weakref.ref[torch.Tensor]) -> bool:
    gc.collect()
    return tensor() is not None


def test_a_block_left_by_an_exception_ends_with_the_step() -> None:
    """torch's manager does not end it. Later operations would be kept with their tensors."""

    def act(fabric: Fabric, pair: Circle) -> tuple[bool, bool, bool]:
        group = pair.of(fabric)
        group._start_coalescing(CPU)
        first = begun(group)
        while_open = kept(first)
        fabric.reduce_min((1,))
        return while_open, kept(first), kept(begun(group))

    with circle(2) as pair:
        pair.group()
        assert pair.each(lambda f: act(f, pair)) == [(True, False, False)] * 2


def test_a_standby_also_ends_a_left_block_with_the_step() -> None:
    with circle(2) as pair:
        pair.group()
        standby = pair.standby("s")
        group = pair.of(standby)
        group._start_coalescing(CPU)
        first = begun(group)
        standby.reduce_min((1,))

        assert not kept(first)


def test_a_new_block_does_not_wait_for_an_older_one() -> None:
    def act(fabric: Fabric, pair: Circle) -> list[list[float]]:
        group = pair.of(fabric)
        tensors = [torch.ones(1), torch.ones(1) * 3]
        for tensor in tensors:
            group._start_coalescing(CPU)
            group.allreduce([tensor])
        return [tensor.tolist() for tensor in group._end_coalescing(CPU).result()]

    with circle(2) as pair:
        pair.group()
        assert pair.each(lambda f: act(f, pair)) == [[[6.0]], [[6.0]]]


def test_a_block_belongs_to_the_thread_that_began_it() -> None:
    """Another thread neither ends it nor adds to it."""

    def act(fabric: Fabric, pair: Circle) -> tuple[int, int]:
        group, sizes = pair.of(fabric), []

        def beside() -> None:
            group._start_coalescing(CPU)
            begun(group)
            sizes.append(len(group._end_coalescing(CPU).result()))

        group._start_coalescing(CPU)
        begun(group)
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        begun(group)
        return len(group._end_coalescing(CPU).result()), sizes[0]

    with circle(2) as pair:
        pair.group()
        assert pair.each(lambda f: act(f, pair)) == [(2, 1)] * 2
