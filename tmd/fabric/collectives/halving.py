"""All-reduce of large data by recursive halving, then doubling (Rabenseifner's algorithm).

It moves as many bytes as a ring, in ``2 log2(size)`` rounds. A ring sums elements in an order that
depends on their place in the tensor. Here every element is summed in the order ``((0+1)+(2+3))``,
as in recursive doubling. So no bit of a sum depends on how a script cuts its data into tensors:
DDP rebuilds its buckets after the first backward, and with a ring that changes losses.

A tensor is reduced in chunks, one after another, whose sums stay in the CPU cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tmd.core.worker.broken_step import Span
from tmd.fabric.collectives.op import Op
from tmd.fabric.collectives.parts import Parts
from tmd.fabric.memory import view
from tmd.fabric.reduction import Reduction
from tmd.fabric.topology import folded
from tmd.fabric.transfer import SEGMENT

CHUNK = 8 << 20
"""Most bytes of a chunk among a few ranks."""
CHUNK_OF_A_RANK = 2 << 20
"""A chunk among many ranks has up to this many bytes for each of them. In smaller ones they would
wait more for each other than for data."""
CHUNKS = 16
"""Most chunks of a tensor: those of a very large one are larger."""


def allreduce(op: Op, flat: Tensor, reduction: Reduction, parts: Parts | None = None) -> None:
    """Reduce the one-dimensional ``flat`` over all ranks, in place.

    Ranks beyond the largest power of two first fold into a partner and get the result from it.

    ``parts``: the parts of ``flat``. If given, an element is overwritten only with its final
    value, so partial sums need memory of their own: for at most half of a chunk, or for all of it
    on a rank into which another one folds.
    """
    chunks = list(_chunks(flat, op.size))
    room = None
    if parts is not None and (needed := _partial_sums(op, chunks[0][1])):
        room = parts.room(flat[:needed])
    for chunk in chunks:
        _allreduce_chunk(op, flat, chunk, reduction, parts, room)


def _chunks(flat: Tensor, size: int) -> Iterator[Span]:
    """The chunks of ``flat`` among ``size`` ranks; the last one may be shorter."""
    most = max(CHUNK, size * CHUNK_OF_A_RANK)
    count = max(1, min(CHUNKS, -(-flat.nbytes // most)))
    length = -(-flat.numel() // (16 * count)) * 16
    for start in range(0, flat.numel(), length):
        yield start, min(start + length, flat.numel())


def _partial_sums(op: Op, length: int) -> int:
    """How many elements of a chunk of ``length`` this rank holds partial sums of, at most."""
    core = folded(op.size)
    if op.rank + core < op.size:  # another rank folds into this one
        return length
    return 0 if op.rank >= core or core == 2 else max(_half(length), length - _half(length))


def _allreduce_chunk(
    op: Op,
    flat: Tensor,
    chunk: Span,
    reduction: Reduction,
    parts: Parts | None,
    room: Tensor | None,
) -> None:
    """Reduce the elements ``chunk`` of ``flat``. ``room``: memory for its partial sums."""
    core = folded(op.size)
    own = flat[slice(*chunk)]
    if op.rank >= core:
        op.send(op.rank - core, view(own))
        return _receive(op, op.rank - core, flat, chunk, parts)
    guest = op.rank + core  # the rank that folds into this one, if there is one
    sums, start = own, chunk[0]  # the sums so far, and the element of `flat` with which they begin
    if guest < op.size:
        sums = own if room is None else room[: own.numel()]
        _merge(op, guest, None, own, sums, reduction)
    rounds = []
    partners = list(_partners(op.rank, core))
    for partner in partners:
        half = _half(sums.numel())
        ranges = (start, start + half), (start + half, start + sums.numel())
        give, keep = ranges if op.rank > partner else reversed(ranges)
        given, kept = (sums[first - start : stop - start] for first, stop in (give, keep))
        done = None
        if partner == partners[-1]:
            out, done = flat[slice(*keep)], _finishing(op, reduction, parts, keep[0])
        else:
            out = kept if room is None or sums is not own else room[: kept.numel()]
        _merge(op, partner, given, kept, out, reduction, done)
        sums, start = out, keep[0]
        rounds.append((partner, keep, give))
    for number, (partner, keep, give) in enumerate(reversed(rounds)):
        if parts is None:
            op.swap(partner, view(flat[slice(*keep)]), partner, view(flat[slice(*give)]))
        else:
            _swap(op, partner, keep, give, parts, seal=number == 0)
    if guest < op.size:
        op.send(guest, view(own))


def _partners(rank: int, core: int) -> Iterator[int]:
    distance = 1
    while distance < core:
        yield rank ^ distance
        distance *= 2


def own_parts(rank: int, size: int, flat: Tensor) -> Iterator[Span]:
    """The elements of ``flat`` whose complete sums ``rank`` is the first to have."""
    core = folded(size)
    if rank >= core:
        return
    for start, stop in _chunks(flat, size):
        for partner in _partners(rank, core):
            middle = start + _half(stop - start)
            start, stop = (middle, stop) if rank > partner else (start, middle)
        yield start, stop


def _half(count: int) -> int:
    """Where to split ``count`` elements: in the middle, at a multiple of 16."""
    return min(count, -(-count // 32) * 16)


Done = Callable[[Tensor], None]


def _finishing(op: Op, reduction: Reduction, parts: Parts | None, start: int) -> Done:
    """Begin a sealed part of ``parts`` at ``start``. Returns what to do with each segment of it
    once its sum is complete."""
    sealed = None if parts is None else parts.begin_sealed(start)

    def done(segment: Tensor) -> None:
        reduction.finish(segment, op.shares)
        if sealed is not None:
            sealed.add(segment)

    return done


def _merge(
    op: Op,
    partner: int,
    give: Tensor | None,
    keep: Tensor,
    out: Tensor,
    reduction: Reduction,
    done: Done | None = None,
) -> None:
    """Send ``give`` and merge the partner's data with ``keep`` into ``out``, by segment."""
    scratch = op.scratch.take(min(keep.numel(), SEGMENT // keep.element_size()), keep.dtype)
    landing = view(scratch)
    lower = partner < op.rank
    length = scratch.numel() or 1

    def arrivals() -> Iterator[memoryview]:
        for own, target in zip(torch.split(keep, length), torch.split(out, length), strict=True):
            received = scratch[: own.numel()]
            yield landing[: own.nbytes]
            first, second = (received, own) if lower else (own, received)
            reduction.combine(first, second, out=target)
            if done is not None:
                done(target)

    _stream(op, partner, give, arrivals(), keep.nbytes)


def _swap(op: Op, partner: int, own: Span, missing: Span, parts: Parts, *, seal: bool) -> None:
    """Send the elements ``own``, which are final, and receive the elements ``missing``.

    ``seal``: whether to keep a digest of what is received. Each part then has a digest on two
    ranks: if one of them is lost, the other can still tell whether the script has changed it.
    """
    sent, target = parts.flat[slice(*own)], parts.flat[slice(*missing)]
    if not seal:
        return _receive_parts(op, partner, sent, iter((view(target),)), missing, parts)
    sealed = parts.begin_sealed(missing[0])

    def arrivals() -> Iterator[memoryview]:
        for segment in torch.split(target, SEGMENT // target.element_size()):
            yield view(segment)
            sealed.add(segment)

    _receive_parts(op, partner, sent, arrivals(), missing, parts)


def _receive(op: Op, source: int, flat: Tensor, chunk: Span, parts: Parts | None) -> None:
    target = flat[slice(*chunk)]
    if parts is None:
        return op.receive(source, view(target))
    _receive_parts(op, source, None, iter((view(target),)), chunk, parts)


def _receive_parts(
    op: Op,
    partner: int,
    give: Tensor | None,
    arrivals: Iterator[memoryview],
    missing: Span,
    parts: Parts,
) -> None:
    """Receive the elements ``missing`` into the tensor, each at once: those that a break keeps away
    stay inputs."""
    size = parts.flat.element_size()
    with parts.receiving(*missing):
        _stream(op, partner, give, arrivals, (missing[1] - missing[0]) * size, size)


def _stream(
    op: Op,
    partner: int,
    give: Tensor | None,
    arrivals: Iterator[memoryview],
    nbytes: int,
    unit: int = 1,
) -> None:
    """Send ``give``, unless it is ``None``, to ``partner``, and receive ``nbytes`` from it."""
    if give is None:
        return op.stream(None, deque(), 0, partner, arrivals, nbytes, unit)
    queue = deque([view(give)] if give.numel() else [])
    op.stream(partner, queue, give.nbytes, partner, arrivals, nbytes, unit)
