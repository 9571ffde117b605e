"""Collectives on tensors that were made in inference mode.

Other threads than the caller's run an operation, and there torch refuses to write such a tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.fabric.circle import Circle, circle
from tmd.fabric import Group
from tmd.fabric.collectives.allreduce import SMALL
from tmd.fabric.memory import has_memory, writable
from tmd.fabric.objects import NONE, empty

LARGE = SMALL // 4 + 2
Call = Callable[[Group, int], Tensor]


def later(group: Group, length: int) -> Tensor:
    tensor = torch.full((length,), 1.0 + group.rank())
    group.allreduce([tensor]).wait()
    return tensor


def strided(group: Group, length: int) -> Tensor:
    tensor = torch.full((2, length), 1.0 + group.rank()).t()[:, 0]
    group.allreduce([tensor]).wait()
    return tensor


def scattered(group: Group, length: int) -> Tensor:
    tensor = torch.empty(length)
    given = torch.full((length * group.size(),), 1.0 + group.rank())
    group._reduce_scatter_base(tensor, given).wait()
    return tensor


def inferred(c: Circle, call: Call, length: int) -> list[Tensor]:
    def one(fabric) -> Tensor:
        with torch.inference_mode():
            found = call(c.of(fabric), length)
            assert found.is_inference()
            return found.clone()

    return c.each(one)


@pytest.mark.parametrize("length", [0, 4, LARGE])
@pytest.mark.parametrize("call", [later, strided, scattered])
def test_an_operation_on_a_thread_of_its_own(call: Call, length: int) -> None:
    with circle(2) as c:
        c.group()
        for found in inferred(c, call, length):
            assert torch.equal(found, torch.full((length,), 3.0))
        assert not any(fabric.poisoned for fabric in c.fabrics)


def test_a_worker_without_a_rank() -> None:
    """Its operations take neutral values, on the same thread."""
    with circle(2) as c:
        c.group()
        standby = c.of(c.standby("w2", rank=1))
        with torch.inference_mode():
            work = standby.allreduce([torch.ones(4)])
            work.wait()
            assert work.exception() is None
            out = torch.empty(4)
            work = standby._reduce_scatter_base(out, torch.ones(8))
            work.wait()
            assert work.exception() is None
            assert torch.equal(out, torch.ones(4))


def test_an_object_without_a_sender() -> None:
    with torch.inference_mode():
        size, pickled = torch.zeros(1, dtype=torch.int64), torch.zeros(5, dtype=torch.uint8)
    empty([size, pickled])
    assert size.item() == len(NONE)
    assert bytes(pickled[:2].tolist()) == NONE


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_a_writable_tensor_shares_the_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    with torch.inference_mode():
        tensor = torch.zeros(shape, dtype=dtype)
    found = writable(tensor)
    found.fill_(1)
    assert not found.is_inference()
    assert (found.shape, found.dtype) == (tensor.shape, dtype)
    assert torch.equal(tensor.to(torch.complex64), torch.ones(shape, dtype=torch.complex64))


def test_a_writable_tensor_shares_the_storage() -> None:
    """So that memory which the script frees is seen to be gone."""
    with torch.inference_mode():
        tensor = torch.zeros(8)[2:]
    found = writable(tensor)
    found[0] = 1.0
    assert tensor[0] == 1.0
    tensor.untyped_storage().resize_(0)
    assert not has_memory(found)


def test_a_writable_tensor_of_one_that_is_not_plain_is_a_copy() -> None:
    with torch.inference_mode():
        tensor = torch.arange(6.0).view(2, 3).t()
        found = writable(tensor)
    assert not found.is_inference()
    assert found.is_contiguous()
    assert torch.equal(found, tensor)
