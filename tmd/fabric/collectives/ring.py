"""Ring algorithms for large data: each byte crosses each link once.

Each rank has one stream out and one stream in: every arriving segment is reduced or stored and
forwarded at once, so no rank waits for a whole block and the data stays in the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tmd.fabric.collectives.op import Op
from tmd.fabric.memory import view
from tmd.fabric.reduction import Reduction
from tmd.fabric.transfer import SEGMENT


def _segments(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.numel() == 0:
        return ()
    return torch.split(tensor, SEGMENT // tensor.element_size())


def reduce_scatter(op: Op, inputs: Sequence[Tensor], output: Tensor, reduction: Reduction) -> None:
    """Reduce the one-dimensional ``inputs`` (one per rank) and keep this rank's in ``output``.

    The inputs do not change; partial results wait in a pool of one block.
    """
    rank, size = op.rank, op.size
    first = (rank - 1) % size
    scratch = op.scratch.take(
        min(max(i.numel() for i in inputs), SEGMENT // output.element_size()), output.dtype
    )
    landing = view(scratch)
    queue = deque(view(s) for s in _segments(inputs[first]))
    lead = max(len(_segments(i)) for i in inputs) + 2
    pool = [torch.empty_like(scratch) for _ in range(lead if size > 2 else 0)]

    def arrivals() -> Iterator[memoryview | None]:
        used = 0
        for step in range(size - 1):
            last = step == size - 2
            targets = iter(_segments(output)) if last else None
            for segment in _segments(inputs[(rank - step - 2) % size]):
                count = segment.numel()
                yield landing[: segment.nbytes]
                if targets is not None:
                    target = next(targets)
                else:
                    # A buffer of the pool is free once its content has been sent.
                    while used >= lead and len(queue) >= lead:
                        yield None
                    target = pool[used % lead][:count]
                    used += 1
                reduction.combine(scratch[:count], segment, out=target)
                if targets is None:
                    queue.append(view(target))
                else:
                    reduction.finish(target, size)

    total = sum(i.nbytes for i in inputs)
    sent, got = total - inputs[rank].nbytes, total - inputs[first].nbytes
    op.stream((rank + 1) % size, queue, sent, first, arrivals(), got)


def allgather(op: Op, parts: Sequence[memoryview]) -> None:
    """All-gather: fill ``parts`` (one per rank) with each rank's own part."""
    rank, size = op.rank, op.size
    queue = deque([parts[rank]] if len(parts[rank]) else [])

    def arrivals() -> Iterator[memoryview]:
        for step in range(size - 1):
            part = parts[(rank - step - 1) % size]
            for start in range(0, len(part), SEGMENT):
                segment = part[start : start + SEGMENT]
                yield segment
                if step < size - 2:
                    queue.append(segment)

    total = sum(len(p) for p in parts)
    above = (rank + 1) % size
    got = total - len(parts[rank])
    op.stream(above, queue, total - len(parts[above]), (rank - 1) % size, arrivals(), got)


def broadcast(op: Op, data: memoryview, root: int) -> None:
    """Send ``data`` of ``root`` down the ring, forwarding each segment as it arrives."""
    size = op.size
    place = (op.rank - root) % size
    queue: deque[memoryview] = deque()
    if place == 0:
        queue.append(data)

    def arrivals() -> Iterator[memoryview]:
        for start in range(0, len(data) if place else 0, SEGMENT):
            segment = data[start : start + SEGMENT]
            yield segment
            if place < size - 1:
                queue.append(segment)

    to = (op.rank + 1) % size if place < size - 1 else None
    source = (op.rank - 1) % size if place else None
    op.stream(to, queue, len(data), source, arrivals(), len(data))
