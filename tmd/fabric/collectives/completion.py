"""Finishes a large all-reduce that broke, or that some ranks have completed and others have not.

Every rank, including a standby that replaces a lost one, says which parts of the result and which
sums it has. Results are broadcast. All other parts are computed from those sums and from inputs.
"""

from __future__ import annotations

import torch
from msgspec import json
from torch import Tensor

from tmd.core.values.errors import LinkError
from tmd.core.worker.broken_allreduce import Addition, Holding, pieces
from tmd.fabric.collectives import doubling, halving, on_tensors
from tmd.fabric.collectives.allreduce import allreduce
from tmd.fabric.collectives.op import Op
from tmd.fabric.collectives.parts import Parts
from tmd.fabric.memory import view
from tmd.fabric.reduction import Reduction

MESSAGE_BYTES = 2048
"""Size of the message in which a rank says what it has. It is padded with spaces."""


def finish(op: Op, parts: Parts, reduction: Reduction) -> None:
    """Give each rank the result of the all-reduce to which ``parts`` belong.

    Raises:
        LinkError: a link broke, or part of the result is lost: no rank can still give it, since
            scripts have changed it, and it cannot be computed again. Then all ranks raise.
    """
    if op.shares == 1:
        return
    own = parts.holding()
    found = pieces(_exchanged(op, own), parts.flat.numel(), halving.sum_order(op.size))
    if found is None:
        raise LinkError("part of an all-reduce is lost: no rank can give it or compute it again")
    for start, stop, source, additions in found:
        values = parts.values(start, stop)
        if source is None:
            allreduce(op, values, reduction)
        else:
            for each in additions:
                _add(op, each, values, reduction)
            if additions and op.rank == source:
                reduction.finish(values, op.shares)
            on_tensors.broadcast(source)(op, [values], [values])
        if not own.has(start, stop):
            parts.put(start, values)
    parts.forget_copies()


def _add(op: Op, addition: Addition, values: Tensor, reduction: Reduction) -> None:
    if op.rank == addition.giver:
        op.send(addition.taker, view(values))
    elif op.rank == addition.taker:
        received = torch.empty_like(values)
        op.receive(addition.giver, view(received))
        reduction.combine(values, received, out=values)


def _exchanged(op: Op, own: Holding) -> list[Holding]:
    """What each rank has."""
    message = json.encode(own)
    if len(message) > MESSAGE_BYTES:
        # Too many spans: claim to have nothing, which is never wrong.
        message = json.encode(Holding(inputs=False))
    padded = memoryview(message.ljust(MESSAGE_BYTES))
    blocks = doubling.dissemination(op, [MESSAGE_BYTES] * op.size, padded)
    return [json.decode(block, type=Holding) for block in blocks]
