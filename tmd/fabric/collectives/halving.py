"""All-reduce of large data by recursive halving, then doubling (Rabenseifner's algorithm).

It moves as many bytes as a ring, in ``2 log2(size)`` rounds. A ring sums elements in an order that
depends on their place in the tensor. Here every element is summed in the order ``((0+1)+(2+3))``,
as in recursive doubling. So no bit of a sum depends on how a script cuts its data into tensors:
DDP rebuilds its buckets after the first backward, and with a ring that changes losses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from tmd.fabric.collectives.op import Op
from tmd.fabric.memory import view
from tmd.fabric.reduction import Reduction
from tmd.fabric.topology import folded
from tmd.fabric.transfer import SEGMENT


def allreduce(op: Op, flat: Tensor, reduction: Reduction) -> None:
    """Reduce the one-dimensional ``flat`` over all ranks, in place.

    Ranks beyond the largest power of two first fold into a partner and get the result from it.
    """
    core = folded(op.size)
    if op.rank >= core:
        op.send(op.rank - core, view(flat))
        op.receive(op.rank - core, view(flat))
        return
    guest = op.rank + core
    if guest < op.size:
        _merge(op, guest, flat[:0], flat, reduction)
    rounds = []
    part = flat
    for partner in _partners(op.rank, core):
        half = _half(part.numel())
        upper = op.rank > partner
        keep, give = (part[half:], part[:half]) if upper else (part[:half], part[half:])
        _merge(op, partner, give, keep, reduction)
        rounds.append((partner, keep, give))
        part = keep
    reduction.finish(part, op.shares)
    for partner, keep, give in reversed(rounds):
        op.swap(partner, view(keep), partner, view(give))
    if guest < op.size:
        op.send(guest, view(flat))


def _partners(rank: int, core: int) -> Iterator[int]:
    distance = 1
    while distance < core:
        yield rank ^ distance
        distance *= 2


def _half(count: int) -> int:
    """Where to split ``count`` elements: in the middle, at a multiple of 16."""
    return min(count, -(-count // 32) * 16)


def _merge(op: Op, partner: int, give: Tensor, keep: Tensor, reduction: Reduction) -> None:
    """Send ``give`` and merge the partner's data into ``keep``, segment by segment."""
    scratch = op.scratch.take(min(keep.numel(), SEGMENT // keep.element_size()), keep.dtype)
    landing = view(scratch)
    lower = partner < op.rank

    def arrivals() -> Iterator[memoryview]:
        for segment in torch.split(keep, scratch.numel() or 1):
            received = scratch[: segment.numel()]
            yield landing[: segment.nbytes]
            first, second = (received, segment) if lower else (segment, received)
            reduction.combine(first, second, out=segment)

    queue = deque([view(give)] if give.numel() else [])
    to = partner if give.numel() else None
    op.stream(to, queue, give.nbytes, partner, arrivals(), keep.nbytes)
