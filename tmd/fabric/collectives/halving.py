"""All-reduce of large data by recursive halving, then doubling (Rabenseifner's algorithm).

It moves as many bytes as a ring, in ``2 log2(size)`` rounds. A ring sums elements in an order that
depends on their place in the tensor. Here every element is summed in the order ``((0+1)+(2+3))``,
as in recursive doubling. So no bit of a sum depends on how a script cuts its data into tensors:
the sizes of DDP's buckets change no loss.

A tensor is reduced in place, in chunks, one after another, whose sums stay in the CPU cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tmd.core.worker.broken_allreduce import Span, SumOrder
from tmd.fabric.collectives.op import Op
from tmd.fabric.collectives.parts import NO_DIGEST, Parts, Sealing
from tmd.fabric.memory import EMPTY, view
from tmd.fabric.reduction import Reduction
from tmd.fabric.topology import folded
from tmd.fabric.transfer import SEGMENT

CHUNK = 8 << 20
"""Maximum bytes of a chunk with few ranks, unless ``CHUNKS`` makes it larger."""
CHUNK_OF_A_RANK = 2 << 20
"""With many ranks a chunk has up to this many bytes per rank. With smaller chunks the ranks would
wait more for each other than for data."""
CHUNKS = 16
"""Maximum number of chunks of a tensor. A very large tensor gets larger chunks instead."""


def allreduce(op: Op, flat: Tensor, reduction: Reduction, parts: Parts | None = None) -> None:
    """Reduce the one-dimensional ``flat`` over all ranks, in place.

    Ranks beyond the largest power of two first fold into a partner and get the result from it.

    ``parts``: the parts of ``flat``. If given, they record what each element holds.
    """
    for chunk in _chunks(flat, op.size):
        if parts is not None:
            parts.begin_chunk()
        _allreduce_chunk(op, flat, chunk, reduction, parts)


def _chunks(flat: Tensor, size: int) -> Iterator[Span]:
    """The chunks of ``flat`` among ``size`` ranks; the last one may be shorter."""
    most = max(CHUNK, size * CHUNK_OF_A_RANK)
    count = max(1, min(CHUNKS, -(-flat.nbytes // most)))
    length = -(-flat.numel() // (16 * count)) * 16
    for start in range(0, flat.numel(), length):
        yield start, min(start + length, flat.numel())


def _allreduce_chunk(
    op: Op, flat: Tensor, chunk: Span, reduction: Reduction, parts: Parts | None
) -> None:
    """Reduce the elements ``chunk`` of ``flat``."""
    core = folded(op.size)
    own = flat[slice(*chunk)]
    if op.rank >= core:
        op.send(op.rank - core, view(own))
        return _receive(op, op.rank - core, flat, chunk, parts)
    guest = op.rank + core  # the rank that folds into this one, if there is one
    if guest < op.size:
        summed = None if parts is None else parts.begin_sum(chunk[0], ranks=2).extend
        _merge(op, guest, None, own, reduction, summed)
    rounds, digest = [], NO_DIGEST
    start, stop = chunk  # the elements that this rank reduces further
    for number, partner in enumerate(_partners(op.rank, core), start=1):
        middle = start + _half(stop - start)
        halves = (start, middle), (middle, stop)
        give, keep = halves if op.rank > partner else reversed(halves)
        done: Done | None = None
        sealing = None
        if 1 << number == core:
            sealing = None if parts is None else parts.begin_sealing(keep[0])
            done = _finishing(op, reduction, sealing)
        elif parts is not None:
            done = parts.begin_sum(keep[0], _contained(op, 1 << number)).extend
        _merge(op, partner, flat[slice(*give)], flat[slice(*keep)], reduction, done)
        if sealing is not None:
            digest = sealing.sealed().digest
        start, stop = keep
        rounds.append((partner, keep, give))
    for partner, keep, give in reversed(rounds):
        _swap(op, partner, flat, keep, give, parts, digest)
        digest = b""
    if guest < op.size:
        op.send(guest, view(own))


def _partners(rank: int, core: int) -> Iterator[int]:
    distance = 1
    while distance < core:
        yield rank ^ distance
        distance *= 2


def _contained(op: Op, block: int) -> int:
    """How many ranks' inputs are in a sum that ``block`` ranks share: theirs, and those of the
    ranks that fold into them."""
    first = op.rank // block * block
    guests = range(first, min(first + block, op.size - folded(op.size)))
    return block + len(guests)


def sum_order(size: int) -> SumOrder:
    """The order in which the inputs of ``size`` ranks are summed."""
    core = folded(size)
    sums: list[SumOrder] = [(r, r + core) if r + core < size else r for r in range(core)]
    while len(sums) > 1:
        sums = list(zip(sums[::2], sums[1::2], strict=True))
    return sums[0]


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


def _finishing(op: Op, reduction: Reduction, sealing: Sealing | None) -> Done:
    """What to do with each segment whose sum is complete."""

    def done(segment: Tensor) -> None:
        reduction.finish(segment, op.shares)
        if sealing is not None:
            sealing.add(segment)

    return done


def _merge(
    op: Op,
    partner: int,
    give: Tensor | None,
    keep: Tensor,
    reduction: Reduction,
    done: Done | None,
) -> None:
    """Send ``give`` and merge the partner's data with ``keep``, in place and by segment."""
    scratch = op.scratch.take(min(keep.numel(), SEGMENT // keep.element_size()), keep.dtype)
    landing = view(scratch)
    lower = partner < op.rank
    length = scratch.numel() or 1

    def arrivals() -> Iterator[memoryview]:
        for own in torch.split(keep, length):
            received = scratch[: own.numel()]
            yield landing[: own.nbytes]
            first, second = (received, own) if lower else (own, received)
            reduction.combine(first, second, out=own)
            if done is not None:
                done(own)

    _stream(op, partner, None if give is None else [view(give)], arrivals(), keep.nbytes)


def _swap(
    op: Op,
    partner: int,
    flat: Tensor,
    own: Span,
    missing: Span,
    parts: Parts | None,
    digest: bytes,
) -> None:
    """Send the elements ``own``, which are final, and receive the elements ``missing``.

    ``digest``: of ``own``. In the first swap each partner sends the digest of its part, so that two
    ranks know it: if one of them is lost, the other can still tell whether the script has changed
    the part. A rank that keeps no parts sends zeros: ranks may differ in that, and the length of a
    message must not depend on it.
    """
    give = view(flat[slice(*own)]), memoryview(digest)
    received = bytearray(len(digest))
    _receive(op, partner, flat, missing, parts, give, memoryview(received))
    if parts is not None and digest:
        parts.seal(*missing, bytes(received))


def _receive(
    op: Op,
    partner: int,
    flat: Tensor,
    missing: Span,
    parts: Parts | None,
    give: Sequence[memoryview] | None = None,
    beyond: memoryview = EMPTY,
) -> None:
    """Receive the elements ``missing``, and then ``beyond``; send ``give``, unless it is ``None``.

    With ``parts``, no element is ever half-written: those that do not arrive because of a break
    keep their values.
    """
    target = view(flat[slice(*missing)])
    arrivals, nbytes = iter((target, beyond)), len(target) + len(beyond)
    if parts is None:
        return _stream(op, partner, give, arrivals, nbytes)
    with parts.receiving(*missing):
        _stream(op, partner, give, arrivals, nbytes, flat.element_size())


def _stream(
    op: Op,
    partner: int,
    give: Sequence[memoryview] | None,
    arrivals: Iterator[memoryview],
    nbytes: int,
    unit: int = 1,
) -> None:
    """Send ``give``, unless it is ``None``, to ``partner``, and receive ``nbytes`` from it."""
    if give is None:
        return op.stream(None, deque(), 0, partner, arrivals, nbytes, unit)
    queue = deque(data for data in give if len(data))
    op.stream(partner, queue, sum(len(data) for data in give), partner, arrivals, nbytes, unit)
