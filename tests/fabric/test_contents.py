"""What arrives: tensors of unusual layouts, and objects of which only a part came."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FunctionType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.fabric.circle import Circle, circle, sync
from tmd.fabric import Fabric
from tmd.fabric.objects import NONE

pytestmark = pytest.mark.timeout(60)

LARGE = 40 << 20


def negative(rank: int) -> Tensor:
    """A real tensor whose bit says that it is to be negated, and whose rows are not contiguous."""
    found = torch.complex(torch.zeros(2, 3), torch.arange(6.0).reshape(2, 3) + 10 * rank).mH.imag
    assert found.is_neg()
    assert not found.is_contiguous()
    return found


def gathered(c: Circle, fabric: Fabric) -> list[Tensor]:
    found = [torch.zeros(3, 2) for _ in range(2)]
    c.of(fabric).allgather([found], [negative(fabric.rank or 0)]).wait()
    return found


def summed(c: Circle, fabric: Fabric) -> list[Tensor]:
    own = negative(fabric.rank or 0)
    c.of(fabric).allreduce([own], sync()).wait()
    return [own]


def sent(c: Circle, fabric: Fabric) -> list[Tensor]:
    other, got = 1 - (fabric.rank or 0), torch.zeros(3, 2)
    c.of(fabric).send([negative(fabric.rank or 0)], other)
    c.of(fabric).recv([got], other).wait()
    return [got]


@pytest.mark.parametrize("call", [gathered, summed, sent])
def test_a_negated_transposed_tensor_arrives_in_its_order(
    call: Callable[[Circle, Fabric], list[Tensor]],
) -> None:
    both = [negative(rank).clone(memory_format=torch.contiguous_format) for rank in range(2)]
    of_ranks: dict[object, list[list[Tensor]]] = {
        gathered: [both, both],
        summed: [[both[0] + both[1]]] * 2,
        sent: [[both[1]], [both[0]]],
    }
    with circle(2) as c:
        c.group()
        for found, wanted in zip(c.each(lambda f: call(c, f)), of_ranks[call], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert not any(f.poisoned for f in c.fabrics)


def as_object(act: Callable[[], None]) -> None:
    """Run ``act`` as torch's ``broadcast_object_list`` does: a group looks at the call stack."""

    def broadcast_object_list(act: Callable[[], None]) -> None:
        act()

    scope = {"__name__": dist.distributed_c10d.__name__}
    FunctionType(broadcast_object_list.__code__, scope)(act)


def test_an_object_that_broke_on_its_way_is_none() -> None:
    """Half of a pickle must not be read as an object that nobody has sent."""
    opts = dist.BroadcastOptions()
    opts.rootRank, opts.asyncOp = 0, False

    def one(c: Circle, fabric: Fabric) -> Tensor:
        content = torch.full((LARGE,), 7 if fabric.rank == 0 else 0, dtype=torch.uint8)
        ended = threading.Event()

        def poison_midway() -> None:
            while not ended.is_set():
                if content[0] == 7:
                    return fabric.poison("a peer was lost")

        if fabric.rank == 1:
            threading.Thread(target=poison_midway, daemon=True).start()
        as_object(lambda: c.of(fabric).broadcast([content], opts).wait() and None)
        ended.set()
        return content

    with circle(2) as c:
        c.group()
        _, found = c.each(lambda f: one(c, f))

        assert c.fabrics[1].poisoned
        assert bytes(found[: len(NONE)].tolist()) == NONE
        assert not (found == 7).any()
