"""Which ranks can finish a broken step in which an object was sent."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.fabric.circle import circle
from tests.fabric.test_contents import as_object
from tmd.fabric import Fabric, Group

Call = Callable[[Group, Tensor, bool], None]
SIZE = 3


def broadcast(group: Group, part: Tensor, root: bool) -> None:
    opts = dist.BroadcastOptions()
    opts.rootRank = 0
    group.broadcast([part], opts).wait()


def scatter(group: Group, part: Tensor, root: bool) -> None:
    opts = dist.ScatterOptions()
    opts.rootRank = 0
    group.scatter([part], [[part.clone()] * SIZE] if root else [], opts).wait()


def allgather(group: Group, part: Tensor, root: bool) -> None:
    group.allgather([[part.clone() for _ in range(SIZE)]], [part]).wait()


@pytest.mark.parametrize(
    ("call", "is_object", "can"),
    [
        (broadcast, False, [True, True, True]),
        (broadcast, True, [True, False, False]),
        (scatter, True, [True, False, False]),
        (allgather, True, [True, True, True]),
    ],
)
def test_a_rank_that_has_received_an_object_cannot_finish_the_step(
    call: Call, is_object: bool, can: list[bool]
) -> None:
    """One such rank is enough for the step to be repeated. The rank that has sent it is none."""
    with circle(SIZE) as c:
        c.group()
        for fabric in c.fabrics:
            fabric.step.on_break = lambda: None
            fabric.step.begin(keeps=True)

        def act(fabric: Fabric) -> None:
            part = torch.full((4,), 7, dtype=torch.uint8)
            run = partial(call, c.of(fabric), part, fabric.rank == 0)
            as_object(run) if is_object else run()

        c.each(act)

        assert [fabric.step.can_go_on for fabric in c.fabrics] == can
