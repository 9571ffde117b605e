"""A large all-reduce breaks at any byte, and is finished with another worker."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import combinations, pairwise
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ReduceOp

from tests.fabric.circle import at_once
from tmd.core.values.errors import LinkError
from tmd.core.worker.broken_allreduce import SumOrder
from tmd.fabric.collectives import halving
from tmd.fabric.collectives.completion import finish as finish_one
from tmd.fabric.collectives.op import Op
from tmd.fabric.collectives.parts import Parts
from tmd.fabric.frame import FrameHeader, FrameKind
from tmd.fabric.link import Link
from tmd.fabric.memory import Scratch
from tmd.fabric.reduction import Reduction, reduction
from tmd.fabric.topology import folded

pytestmark = pytest.mark.timeout(60)
LENGTH = 5000
SHORT_S = 0.02
"""Between pieces of a message, so that most are received alone."""
SEVERAL_CHUNKS = 2_700_000
"""Elements of four bytes that are two chunks, also among five ranks."""
T = TypeVar("T")
SIZES = st.integers(2, 5)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        return here, server.accept()[0]


class Mesh:
    """Links between all ranks. ``leave`` ends those of one."""

    def __init__(self, size: int) -> None:
        self._links: list[dict[int, Link]] = [{} for _ in range(size)]
        for low, high in combinations(range(size), 2):
            for rank, peer, end in zip((low, high), (high, low), tcp_pair(), strict=True):
                self._links[rank][peer] = Link(end, f"w{peer}", f"w{low}")

    def of(self, rank: int, kind: type[Op] = Op) -> Op:
        header = FrameHeader(1, 0, FrameKind.ALLREDUCE, 0, 0, 0)
        links = self._links[rank]
        return kind(rank, len(self._links), header, links.__getitem__, Scratch())

    def leave(self, rank: int) -> None:
        for link in self._links[rank].values():
            link.close()

    def close(self) -> None:
        for rank in range(len(self._links)):
            self.leave(rank)


def on_all(size: int, act: Callable[[int], T]) -> list[T]:
    """Run ``act`` for each rank in a thread of its own."""
    return at_once([partial(act, rank) for rank in range(size)])


class Killed(Exception):
    """The process of the rank ends."""


def dying(message: int, sent: int) -> type[Op]:
    """An operation whose process is killed in the midst of a message, after ``sent`` bytes."""

    class Dying(Op):
        messages = 0

        def _dies(self, to: int | None, header: memoryview, payload: memoryview) -> None:
            if to is None:
                return
            type(self).messages += 1
            if self.messages > message:
                data = bytes(header) + bytes(payload)
                self._open(to).sock.sendall(data[:sent])
                raise Killed

        def send(self, to: int, payload: memoryview) -> None:
            self._dies(to, memoryview(self._header.packed(len(payload))), payload)
            super().send(to, payload)

        def stream(
            self,
            to: int | None,
            queue: deque[memoryview],
            total_out: int,
            source: int | None,
            arrivals: Iterator[memoryview | None],
            total_in: int,
            unit: int = 1,
        ) -> None:
            payload = memoryview(b"".join(queue))
            self._dies(to, memoryview(self._header.packed(total_out)), payload)
            super().stream(to, queue, total_out, source, arrivals, total_in, unit)

    return Dying


def data(rank: int, dtype: torch.dtype, length: int = LENGTH) -> Tensor:
    values = torch.randn(length, generator=torch.Generator().manual_seed(rank))
    return (100 * values).to(dtype)


def parts_of(rank: int, dtype: torch.dtype, length: int = LENGTH) -> Parts:
    return Parts(data(rank, dtype, length))


@cache
def expected(size: int, how: Reduction, dtype: torch.dtype, length: int = LENGTH) -> bytes:
    """The result of the plain algorithm, without parts."""
    mesh = Mesh(size)
    tensors = [data(rank, dtype, length) for rank in range(size)]
    on_all(size, lambda rank: halving.allreduce(mesh.of(rank), tensors[rank], how))
    mesh.close()
    return bits(tensors[0])


def carried_out(
    all_parts: list[Parts],
    act: Callable[[Op, Parts], object],
    lost: int | None = None,
    lost_op: type[Op] = Op,
) -> list[bool]:
    """Run ``act`` on every rank, over new links. Rank ``lost`` ends, and every rank that finds a
    broken link leaves, as in a job. Returns by rank whether it has come to the end of ``act``."""
    mesh = Mesh(len(all_parts))

    def one(rank: int) -> bool:
        try:
            act(mesh.of(rank, lost_op if rank == lost else Op), all_parts[rank])
        except (LinkError, Killed):
            mesh.leave(rank)
            return False
        return True

    found = on_all(len(all_parts), one)
    mesh.close()
    return found


def run_until(lost: int, all_parts: list[Parts], how: Reduction, lost_op: type[Op]) -> list[bool]:
    """Run the all-reduce on all ranks; rank ``lost`` ends in it. Returns by rank whether it was
    completed there."""

    def act(op: Op, parts: Parts) -> None:
        halving.allreduce(op, parts.flat, how, parts)
        parts.completed()

    return carried_out(all_parts, act, lost, lost_op)


def finish(
    all_parts: list[Parts], how: Reduction, lost: int | None = None, lost_op: type[Op] = Op
) -> list[bool]:
    """Finish the broken all-reduce; rank ``lost`` ends meanwhile. Returns by rank whether that was
    possible."""
    return carried_out(all_parts, lambda op, parts: finish_one(op, parts, how), lost, lost_op)


def broken_and_finished(
    size: int, lost: int, how: Reduction, dtype: torch.dtype, length: int, lost_op: type[Op]
) -> tuple[list[bool], list[bytes]]:
    """Break an all-reduce by the loss of rank ``lost``, and finish it with a worker that has only
    inputs. Returns by rank whether that was possible, and the bits of its tensor after it."""
    all_parts = [parts_of(rank, dtype, length) for rank in range(size)]
    run_until(lost, all_parts, how, lost_op)
    all_parts[lost] = parts_of(lost, dtype, length)
    return finish(all_parts, how), [bits(parts.flat) for parts in all_parts]


def bits(tensor: Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


@settings(max_examples=150, deadline=None)
@given(
    size=SIZES,
    lost=st.integers(0, 4),
    message=st.integers(0, 5),
    sent=st.integers(0, 4 * LENGTH),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int16]),
    named=st.sampled_from([ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX]),
)
def test_it_is_finished_with_the_same_bits(
    size: int, lost: int, message: int, sent: int, dtype: torch.dtype, named: object
) -> None:
    """Wherever it breaks, and however far each rank had come. The other worker has only inputs."""
    how, end = reduction(named, dtype, "all_reduce"), dying(message, sent)
    found, results = broken_and_finished(size, lost % size, how, dtype, LENGTH, end)

    assert found == [True] * size
    assert results == [expected(size, how, dtype)] * size


@settings(max_examples=20, deadline=None)
@given(
    size=SIZES,
    lost=st.integers(0, 4),
    message=st.integers(0, 10),
    sent=st.integers(0, 4 * SEVERAL_CHUNKS),
)
def test_several_chunks_are_finished_with_the_same_bits(
    size: int, lost: int, message: int, sent: int
) -> None:
    """Some chunks are complete on all ranks, one is broken, others have not begun."""
    how = reduction(ReduceOp.SUM, torch.float32, "all_reduce")
    length, end = SEVERAL_CHUNKS, dying(message, sent)
    found, results = broken_and_finished(size, lost % size, how, torch.float32, length, end)

    assert found == [True] * size
    assert results == [expected(size, how, torch.float32, length)] * size


@pytest.mark.parametrize("length", [1000, SEVERAL_CHUNKS])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_what_a_rank_has_first_is_what_it_serves(size: int, length: int) -> None:
    """The parts that a standby takes over, as the algorithm has sealed them on that rank."""
    how = reduction(ReduceOp.SUM, torch.float32, "all_reduce")
    mesh = Mesh(size)
    all_parts = [parts_of(rank, torch.float32, length) for rank in range(size)]
    on_all(size, lambda r: halving.allreduce(mesh.of(r), all_parts[r].flat, how, all_parts[r]))
    mesh.close()
    holdings = [parts.holding() for parts in all_parts]
    assert {each.final for each in holdings} == {((0, length),)}
    *_, (last, _) = halving._chunks(all_parts[0].flat, size)
    assert all(part.start >= last for each in holdings for part in each.sums)
    for parts in all_parts:
        parts.completed()

    owned = [list(halving.own_parts(r, size, all_parts[r].flat)) for r in range(size)]
    assert sum(stop - start for spans in owned for start, stop in spans) == length
    for parts, spans in zip(all_parts, owned, strict=True):
        assert {*spans} <= {*parts.holding().final}


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("changed", [False, True])
def test_a_result_that_scripts_have_changed_is_given_to_nobody(size: int, changed: bool) -> None:
    """All survivors have completed it. If all have changed it, all find that out."""
    how = reduction(ReduceOp.SUM, torch.float32, "all_reduce")
    all_parts = [parts_of(rank, torch.float32) for rank in range(size)]
    run_until(size - 1, all_parts, how, Op)
    lost = size - 1
    all_parts[lost] = parts_of(lost, torch.float32)
    for parts in all_parts[: lost if changed else 0]:
        parts.flat.mul_(0.5)

    found = finish(all_parts, how)

    assert found == [not changed] * size
    if not changed:
        result = expected(size, how, torch.float32)
        assert all(bits(parts.flat) == result for parts in all_parts)


def test_a_result_whose_memory_the_script_has_freed_is_given_to_nobody() -> None:
    """As FSDP1 frees a gathered buffer. Reading it would end the process."""
    parts = parts_of(0, torch.float32)
    parts.begin_sealing(0).add(parts.flat)
    parts.completed()
    parts.flat.untyped_storage().resize_(0)

    assert parts.holding().final == ()


@pytest.mark.parametrize("pieces", [[400], [401], [403, 1], [1, 1, 1], [2, 7, 999], [3, 4000]])
def test_a_break_tears_no_element(pieces: list[int]) -> None:
    """However the bytes before it come: what is not replaced by a result is still an input."""
    before, result = data(0, torch.float32), data(1, torch.float32)
    sent = sum(pieces)
    parts = Parts(before.clone())
    header = FrameHeader(1, 0, FrameKind.ALLREDUCE, 0, 0, 0).packed(LENGTH * 4)
    stream = header + bits(result)[:sent]
    cuts = [0, *(len(header) + sum(pieces[: n + 1]) for n in range(len(pieces)))]
    mesh = Mesh(2)

    def give(rank: int) -> None:
        link = mesh._links[rank][1 - rank]
        if rank == 1:
            for start, stop in pairwise(cuts):
                link.sock.sendall(stream[start:stop])
                taken.acquire(timeout=SHORT_S)
            return link.close()
        missing = (0, LENGTH)
        with pytest.raises(LinkError):
            halving._receive(mesh.of(0), 1, parts.flat, missing, parts)

    taken = threading.Semaphore(0)
    on_all(2, give)
    mesh.close()

    whole = sent // 4
    assert bits(parts.flat) == bits(result)[: 4 * whole] + bits(before)[4 * whole :]
    assert parts.holding().final == (((0, whole),) if whole else ())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), min_size=2, max_size=7))
def test_ranks_that_keep_parts_and_ranks_that_do_not_work_together(keep: list[bool]) -> None:
    """Whether a rank does is its own affair: it may have sent a message in this step."""
    how, size = reduction(ReduceOp.SUM, torch.float32, "all_reduce"), len(keep)
    mesh = Mesh(size)
    all_parts = [parts_of(rank, torch.float32) for rank in range(size)]

    def act(rank: int) -> None:
        parts = all_parts[rank]
        halving.allreduce(mesh.of(rank), parts.flat, how, parts if keep[rank] else None)
        parts.completed()

    on_all(size, act)
    mesh.close()

    result = expected(size, how, torch.float32)
    assert [bits(parts.flat) for parts in all_parts] == [result] * size
    for rank, (parts, kept) in enumerate(zip(all_parts, keep, strict=True)):
        sealed = sorted(parts.holding().final)
        owners = [rank, rank ^ folded(size) // 2] if kept and rank < folded(size) else []
        own = [span for owner in owners for span in halving.own_parts(owner, size, parts.flat)]
        assert sealed == sorted(span for span in own if span[0] < span[1])


def test_a_break_within_the_digest_leaves_the_next_part_as_it_is() -> None:
    """The digest of a part follows its elements in the same message."""
    parts = parts_of(0, torch.float32)
    error = LinkError("the link broke")
    error.arrived = 40 + 8
    with pytest.raises(LinkError), parts.receiving(5, 15):
        raise error
    assert parts.holding().final == ((5, 15),)


@pytest.mark.parametrize("size", [4, 5, 7])
def test_partial_sums_are_what_the_rank_says(size: int) -> None:
    """Whatever is in the tensor once it has broken: its input, a sum of some ranks, or a result."""
    how = reduction(ReduceOp.SUM, torch.int16, "all_reduce")
    all_parts = [parts_of(rank, torch.int16) for rank in range(size)]
    run_until(0, all_parts, how, dying(1, 4000))
    summed = 0
    for rank, parts in enumerate(all_parts):
        holding = parts.holding()
        values = data(rank, torch.int16)
        for start, stop, count in holding.sums:
            (node,) = (n for n in nodes(halving.sum_order(size)) if rank in n and len(n) == count)
            values[start:stop] = sum(data(each, torch.int16)[start:stop] for each in node)
            summed += stop - start
        for start, stop in holding.final:
            values[start:stop] = sum(data(each, torch.int16)[start:stop] for each in range(size))
        assert torch.equal(parts.flat, values)
    assert summed


def nodes(order: SumOrder) -> list[frozenset[int]]:
    """The ranks of each sum in ``order``."""
    if isinstance(order, int):
        return [frozenset((order,))]
    left, right = (nodes(each) for each in order)
    return [left[0] | right[0], *left, *right]


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(3, 7),
    lost=st.permutations(range(7)),
    messages=st.lists(st.integers(0, 5), min_size=2, max_size=3),
    sent=st.lists(st.integers(0, 4 * LENGTH), min_size=3, max_size=3),
)
def test_several_losses_change_no_bit(
    size: int, lost: list[int], messages: list[int], sent: list[int]
) -> None:
    """Ranks are lost one after another, while the operation runs and while it is finished. Only a
    result that a script has may get lost, with the ranks that had a digest of it."""
    how = reduction(ReduceOp.AVG, torch.float32, "all_reduce")
    all_parts = [parts_of(rank, torch.float32) for rank in range(size)]
    ends = [dying(*each) for each in zip(messages, sent, strict=False)]
    victims = [rank for rank in lost if rank < size]
    complete = run_until(victims[0], all_parts, how, ends[0])
    all_parts[victims[0]] = parts_of(victims[0], torch.float32)
    for victim, end in zip(victims[1:], ends[1:], strict=False):
        finish(all_parts, how, victim, end)
        all_parts[victim] = parts_of(victim, torch.float32)

    found = finish(all_parts, how)
    assert found == [True] * size or (any(complete) and found == [False] * size)
    if found[0]:
        result = expected(size, how, torch.float32)
        assert [bits(parts.flat) for parts in all_parts] == [result] * size


@pytest.mark.parametrize("length", [1, 16, 17, 40])
@pytest.mark.parametrize("size", [4, 6])
@pytest.mark.parametrize("in_parts", [False, True])
def test_ranks_without_a_part_of_their_own(length: int, size: int, in_parts: bool) -> None:
    """A tensor may have fewer blocks of 16 elements than there are ranks."""
    how = reduction(ReduceOp.SUM, torch.float32, "all_reduce")
    mesh = Mesh(size)
    tensors = [data(rank, torch.float32)[:length].clone() for rank in range(size)]
    total = torch.stack(tensors).double().sum(0)

    def act(rank: int) -> None:
        parts = Parts(tensors[rank]) if in_parts else None
        halving.allreduce(mesh.of(rank), tensors[rank], how, parts)

    on_all(size, act)
    mesh.close()
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    assert torch.allclose(tensors[0].double(), total, atol=1e-4)
