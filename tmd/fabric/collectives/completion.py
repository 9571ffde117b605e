"""Finishes a large all-reduce that broke, or that some ranks have completed and others have not.

Every rank, a standby in the place of a lost one among them, says which parts of the result it has.
Those are sent to the ranks without them. All other parts are reduced again from the inputs.
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

ROOM = 2048
"""Bytes of the message in which a rank says what it has, filled up with spaces."""


def finish(op: Op, parts: Parts, reduction: Reduction) -> None:
    """Give each rank the result of the all-reduce to which ``parts`` belong.

    Raises:
        LinkError: a link broke, or part of the result is lost: scripts have changed it on the ranks
            that had it, and it cannot be reduced again. Then all ranks raise.
    """
    if op.shares == 1:
        return
    held = _exchanged(op, parts.holding(), parts.flat.numel())
    found = pieces(held, parts.flat.numel())
    if found is None:
        raise LinkError("no rank has the whole result of an operation that another one lacks")
    for start, stop, source in found:
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
    said = json.encode(own)
    if len(said) > ROOM:
        said = json.encode(Holding(lost=((0, length),)))
    blocks = doubling.dissemination(op, [ROOM] * op.size, memoryview(said.ljust(ROOM)))
    return [json.decode(block, type=Holding) for block in blocks]
