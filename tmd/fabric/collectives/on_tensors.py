"""The other collectives on contiguous CPU tensors: chooses the algorithm and lays out the data.

Every function takes the running operation, the output tensors and the input tensors. For in-place
operations both are the same. The choice of the algorithm depends only on sizes that are equal on
all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tmd.fabric.collectives import doubling, exchange, ring, tree
from tmd.fabric.collectives.allreduce import SMALL, allreduce
from tmd.fabric.collectives.op import Op
from tmd.fabric.memory import view
from tmd.fabric.reduction import Reduction

Tensors = Sequence[Tensor]
Body = Callable[[Op, Tensors, Tensors], None]

SMALL_MOVE = 64 << 10
"""Largest block in bytes for the logarithmic algorithms that only move data."""


def reduce(reduction: Reduction, root: int) -> Body:
    """Reduce over all ranks; only ``root`` gets the result, the others keep their tensors."""

    def body(op: Op, outputs: Tensors, inputs: Tensors) -> None:
        for tensor in outputs:
            result = tensor.view(-1) if op.rank == root else tensor.view(-1).clone()
            allreduce(op, result, reduction)

    return body


def broadcast(root: int) -> Body:
    """Fill each tensor with that of ``root``."""

    def body(op: Op, outputs: Tensors, inputs: Tensors) -> None:
        if op.size == 1:
            return
        for tensor in outputs:
            spread = ring.broadcast if tensor.nbytes > SMALL_MOVE else tree.broadcast
            spread(op, view(tensor), root)

    return body


def allgather(op: Op, outputs: Tensors, inputs: Tensors) -> None:
    """``outputs`` holds one tensor per rank for each input, or one that contains them all."""
    share = len(outputs) // max(1, len(inputs))
    for i, own in enumerate(inputs):
        mine = outputs[i * share : (i + 1) * share]
        parts = [view(t) for t in mine] if share > 1 or op.size == 1 else _cut(mine[0], op.size)
        _allgather(op, view(own), parts)


def _allgather(op: Op, own: memoryview, parts: list[memoryview]) -> None:
    # Not by the size of the own part: parts may differ in size, and all ranks must choose alike.
    if op.size > 1 and max(map(len, parts)) <= SMALL_MOVE:
        found = doubling.dissemination(op, [len(p) for p in parts], own)
        for part, data in zip(parts, found, strict=True):
            part[:] = data
        return
    parts[op.rank][:] = own
    if op.size > 1:
        ring.allgather(op, parts)


def gather(root: int) -> Body:
    """``outputs`` of ``root``: one tensor per rank."""

    def body(op: Op, outputs: Tensors, inputs: Tensors) -> None:
        found = tree.gather(op, view(inputs[0]), root)
        if found is not None:
            for out, data in zip(outputs, found, strict=True):
                view(out)[:] = data

    return body


def scatter(root: int) -> Body:
    """``inputs`` of ``root``: one tensor per rank."""

    def body(op: Op, outputs: Tensors, inputs: Tensors) -> None:
        parts = [view(t) for t in inputs] if op.rank == root else None
        tree.scatter(op, parts, view(outputs[0]), root)

    return body


def reduce_scatter(reduction: Reduction) -> Body:
    """``inputs`` holds one tensor per rank for each output, or one that contains them all."""

    def body(op: Op, outputs: Tensors, inputs: Tensors) -> None:
        share = len(inputs) // max(1, len(outputs))
        for i, out in enumerate(outputs):
            given = [t.view(-1) for t in inputs[i * share : (i + 1) * share]]
            if share == 1 and op.size > 1:
                given = list(torch.split(given[0], max(1, given[0].numel() // op.size)))
            _reduce_scatter(op, given, out.view(-1), reduction)

    return body


def _reduce_scatter(op: Op, given: list[Tensor], out: Tensor, reduction: Reduction) -> None:
    if sum(t.nbytes for t in given) > SMALL and op.size > 1:
        return ring.reduce_scatter(op, given, out, reduction)
    if out.numel() == 0 and not any(t.numel() for t in given):
        return
    flat = torch.cat(given)
    allreduce(op, flat, reduction)
    start = sum(t.numel() for t in given[: op.rank])
    out.copy_(flat[start : start + out.numel()])


def alltoall(op: Op, outputs: Tensors, inputs: Tensors) -> None:
    """One output and one input tensor per rank."""
    exchange.alltoall(op, [view(t) for t in inputs], [view(t) for t in outputs])


def alltoall_single(output_rows: list[int], input_rows: list[int]) -> Body:
    """One output and one input tensor, split by rows."""

    def body(op: Op, outputs: Tensors, inputs: Tensors) -> None:
        exchange.alltoall(op, _rows(inputs[0], input_rows), _rows(outputs[0], output_rows))

    return body


def _rows(tensor: Tensor, rows: list[int]) -> list[memoryview]:
    data = view(tensor)
    width = len(data) // max(1, sum(rows))
    parts, start = [], 0
    for count in rows:
        parts.append(data[start : start + count * width])
        start += count * width
    return parts


def barrier(op: Op, outputs: Tensors, inputs: Tensors) -> None:
    """Return when all ranks have entered."""
    doubling.barrier(op)


def _cut(tensor: Tensor, count: int) -> list[memoryview]:
    data = view(tensor)
    width = len(data) // count
    return [data[i * width : (i + 1) * width] for i in range(count)]
