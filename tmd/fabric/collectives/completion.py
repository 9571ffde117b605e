"""Finishes a large all-reduce that broke, or that some ranks have completed and others have not.

Every rank, including a standby that replaces a lost one, says which parts of the result it has.
Those are broadcast. All other parts are reduced again from the inputs.
"""

from __future__ import annotations

from msgspec import json

from tmd.core.values.errors import LinkError
from tmd.core.worker.broken_step import Holding, pieces
from tmd.fabric.collectives import doubling, on_tensors
from tmd.fabric.collectives.allreduce import allreduce
from tmd.fabric.collectives.op import Op
from tmd.fabric.collectives.parts import Parts
from tmd.fabric.reduction import Reduction

MESSAGE_BYTES = 2048
"""Size of the message in which a rank says what it has. It is padded with spaces."""


def finish(op: Op, parts: Parts, reduction: Reduction) -> None:
    """Give each rank the result of the all-reduce to which ``parts`` belong.

    Raises:
        LinkError: a link broke, or part of the result is lost: no rank can still give it (scripts
            may have changed it), and it cannot be reduced again. Then all ranks raise.
    """
    if op.shares == 1:
        return
    held = _exchanged(op, parts.holding(), parts.flat.numel())
    found = pieces(held, parts.flat.numel())
    if found is None:
        raise LinkError("part of an all-reduce is lost: no rank can give it or reduce it again")
    for start, stop, source in found:
        if all(each.has(start, stop) for each in held):
            continue
        values = parts.values(start, stop)
        if source is None:
            allreduce(op, values, reduction)
        else:
            on_tensors.broadcast(source)(op, [values], [values])
        if not held[op.rank].has(start, stop):
            parts.put(start, values)
    parts.forget_copies()


def _exchanged(op: Op, own: Holding, length: int) -> list[Holding]:
    """What each rank has."""
    message = json.encode(own)
    if len(message) > MESSAGE_BYTES:
        # Too many spans: claim to have nothing, which is never wrong.
        message = json.encode(Holding(lost=((0, length),)))
    padded = memoryview(message.ljust(MESSAGE_BYTES))
    blocks = doubling.dissemination(op, [MESSAGE_BYTES] * op.size, padded)
    return [json.decode(block, type=Holding) for block in blocks]
