"""Finishes a large all-reduce that broke, or that some ranks have completed and others have not.

Every rank, a standby in the place of a lost one among them, says which parts of the result it has.
Those are sent to the ranks without them. All other parts are reduced again from the inputs.
"""

from __future__ import annotations

from msgspec import msgpack

from tmd.core.values.errors import LinkError
from tmd.core.worker.broken_step import Holding, pieces
from tmd.fabric.collectives import doubling, on_tensors
from tmd.fabric.collectives.allreduce import allreduce
from tmd.fabric.collectives.op import Op
from tmd.fabric.collectives.parts import Parts
from tmd.fabric.reduction import Reduction

ROOM = 2048
"""Bytes of the message in which a rank says what it has."""
LENGTH = 2
"""Bytes in front of it that hold its length."""


def finish(op: Op, parts: Parts, reduction: Reduction) -> None:
    """Give each rank the result of the all-reduce to which ``parts`` belong.

    Raises:
        LinkError: a link broke, or no rank has some part of the result that cannot be reduced
            again: scripts have changed it. Then all ranks raise.
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
    said = msgpack.encode(own)
    if len(said) > ROOM - LENGTH:
        said = msgpack.encode(Holding(lost=((0, length),)))
    message = len(said).to_bytes(LENGTH, "little") + said
    blocks = doubling.dissemination(op, [ROOM] * op.size, memoryview(message.ljust(ROOM, b"\0")))
    return [msgpack.decode(_said(block), type=Holding) for block in blocks]


def _said(block: memoryview) -> memoryview:
    return block[LENGTH : LENGTH + int.from_bytes(block[:LENGTH], "little")]
