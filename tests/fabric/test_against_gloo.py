"""Every collective returns what Gloo returns, for random groups, shapes, types and operations."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.fabric import functional_entries
from tests.fabric.entries import EXCLUDED, ROWS, At, Pairs, Variant, public
from tests.fabric.functional_entries import FUNCTIONAL, public_functional
from tests.fabric.pool import Pool, pool

pytestmark = pytest.mark.timeout(120)

WORLD = 5
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-5, torch.complex64: 1e-5}
ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX")
BITWISE = ("BAND", "BOR", "BXOR")


@dataclass(frozen=True)
class Case:
    op: str
    ranks: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    reduce: str
    root: int
    """Position of the root in the group."""
    strided: bool
    splits: tuple[tuple[int, ...], ...]
    """Rows that each rank of the group sends to each other rank."""
    seed: int


def data(case: Case, rank: int, shape: tuple[int, ...] | None = None) -> Tensor:
    """The input of ``rank``: known to all, different on each."""
    shape = case.shape if shape is None else shape
    seed = torch.Generator().manual_seed(case.seed * 100 + rank)
    if case.dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=seed).to(torch.bool)
    if case.dtype.is_floating_point or case.dtype.is_complex:
        return torch.randn(shape, generator=seed, dtype=torch.float64).to(case.dtype)
    return torch.randint(0, 7, shape, generator=seed).to(case.dtype)


def strided(tensor: Tensor) -> Tensor:
    """The same values, not contiguous."""
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def whole_shape(case: Case) -> tuple[int, ...]:
    """One tensor per rank, joined along the first dimension."""
    return (len(case.ranks) * case.shape[0], *case.shape[1:])


Run = Callable[[Case, dist.ProcessGroup, int, Callable[[Tensor], Tensor]], list[Tensor]]


def all_reduce(case, group, rank, lay):
    tensor = lay(data(case, rank))
    dist.all_reduce(tensor, getattr(dist.ReduceOp, case.reduce), group=group)
    return [tensor]


def all_reduce_async(case, group, rank, lay):
    tensors = [lay(data(case, rank)) for _ in range(3)]
    op = getattr(dist.ReduceOp, case.reduce)
    works = [dist.all_reduce(t, op, group=group, async_op=True) for t in tensors]
    for work in reversed(works):
        work.wait()
    return tensors


def all_reduce_coalesced(case, group, rank, lay):
    tensors = [lay(data(case, rank)), lay(data(case, rank + 10))]
    with dist._coalescing_manager(group=group):
        for tensor in tensors:
            dist.all_reduce(tensor, getattr(dist.ReduceOp, case.reduce), group=group)
    return tensors


def reduce(case, group, rank, lay):
    tensor, root = lay(data(case, rank)), case.ranks[case.root]
    dist.reduce(tensor, root, getattr(dist.ReduceOp, case.reduce), group=group)
    return [tensor] if rank == root else []


def broadcast(case, group, rank, lay):
    tensor = lay(data(case, rank))
    dist.broadcast(tensor, case.ranks[case.root], group=group)
    return [tensor]


def all_gather(case, group, rank, lay):
    out = [lay(torch.zeros(case.shape, dtype=case.dtype)) for _ in case.ranks]
    dist.all_gather(out, lay(data(case, rank)), group=group)
    return out


def all_gather_into_tensor(case, group, rank, lay):
    own = data(case, rank)
    out = torch.zeros(whole_shape(case), dtype=case.dtype)
    dist.all_gather_into_tensor(out, own, group=group)
    return [out]


def gather(case, group, rank, lay):
    root = case.ranks[case.root]
    out = [lay(torch.zeros(case.shape, dtype=case.dtype)) for _ in case.ranks]
    dist.gather(lay(data(case, rank)), out if rank == root else None, root, group=group)
    return out if rank == root else []


def scatter(case, group, rank, lay):
    root = case.ranks[case.root]
    parts = [lay(data(case, 10 + r)) for r in case.ranks] if rank == root else None
    out = lay(torch.zeros(case.shape, dtype=case.dtype))
    dist.scatter(out, parts, root, group=group)
    return [out]


def reduce_scatter(case, group, rank, lay):
    parts = [lay(data(case, 10 * rank + r)) for r in case.ranks]
    out = lay(torch.zeros(case.shape, dtype=case.dtype))
    dist.reduce_scatter(out, parts, getattr(dist.ReduceOp, case.reduce), group=group)
    return [out]


def reduce_scatter_tensor(case, group, rank, lay):
    whole = data(case, rank, whole_shape(case))
    out = torch.zeros(case.shape, dtype=case.dtype)
    dist.reduce_scatter_tensor(out, whole, getattr(dist.ReduceOp, case.reduce), group=group)
    return [out]


def all_to_all_single(case, group, rank, lay):
    whole = data(case, rank, (len(case.ranks), *case.shape))
    out = torch.zeros_like(whole)
    dist.all_to_all_single(out, whole, group=group)
    return [out]


def all_to_all_uneven(case, group, rank, lay):
    place = case.ranks.index(rank)
    sends = [row[: len(case.ranks)] for row in case.splits]
    mine = list(sends[place])
    theirs = [sends[r][place] for r in range(len(case.ranks))]
    out = torch.zeros(sum(theirs), 3, dtype=case.dtype)
    dist.all_to_all_single(out, data(case, rank, (sum(mine), 3)), theirs, mine, group=group)
    return [out]


def messages(case, group, rank, lay):
    """To the next rank of the ring with two tags, received in the other order."""
    place, size = case.ranks.index(rank), len(case.ranks)
    up, down = case.ranks[(place + 1) % size], case.ranks[(place - 1) % size]
    if size == 1:
        return []
    out = [lay(torch.zeros(case.shape, dtype=case.dtype)) for _ in range(2)]
    works = [dist.irecv(out[tag], down, group=group, tag=tag) for tag in (1, 0)]
    works += [dist.isend(data(case, rank + 10 * tag), up, group=group, tag=tag) for tag in (0, 1)]
    for work in works:
        work.wait()
    return out


def objects(case, group, rank, lay):
    found: list[Any] = [None] * len(case.ranks)
    dist.all_gather_object(found, {"rank": rank, "seed": case.seed}, group=group)
    seeds = [case.seed if rank == case.ranks[case.root] else None, None]
    dist.broadcast_object_list(seeds, case.ranks[case.root], group=group)
    assert seeds[0] == case.seed
    return [torch.tensor([item["rank"] for item in found])]


def barrier(case, group, rank, lay):
    dist.barrier(group=group)
    return []


REDUCTIONS = {
    f.__name__: f
    for f in (
        all_reduce,
        all_reduce_async,
        all_reduce_coalesced,
        reduce,
        reduce_scatter,
        reduce_scatter_tensor,
    )
}
MOVES = {
    f.__name__: f
    for f in (
        broadcast,
        all_gather,
        all_gather_into_tensor,
        gather,
        scatter,
        all_to_all_single,
        all_to_all_uneven,
        messages,
        objects,
        barrier,
    )
}
RUNS: dict[str, Run] = {**REDUCTIONS, **MOVES}

COMPLEX_MOVES = {"broadcast", "all_gather", "messages"}
"""Gloo supports complex numbers only here."""
JOINED = {"all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"}

_groups: dict[tuple[str, str, tuple[int, ...]], dist.ProcessGroup] = {}


def start(rank: int, size: int, store: dist.Store) -> None:
    import tmd.fabric  # noqa: F401 - registers the backend

    dist.init_process_group(
        "tmd", store=dist.PrefixStore("world", store), rank=rank, world_size=size
    )


def stop(rank: int, size: int, store: dist.Store) -> None:
    dist.destroy_process_group()


def compare(rank: int, size: int, store: dist.Store, case: Case) -> str:
    """Run ``case`` with both backends; returns the digest of tmd's result, or nothing."""
    # Gloo uses the same tags for collectives and messages: they must not share a group.
    purpose = "messages" if case.op == "messages" else "collectives"
    for backend in ("tmd", "gloo"):
        if (backend, purpose, case.ranks) not in _groups:
            made = dist.new_group(list(case.ranks), backend=backend)
            _groups[backend, purpose, case.ranks] = made
    if rank not in case.ranks:
        return ""
    lay = strided if case.strided else Tensor.clone
    run = RUNS[case.op]
    ours = run(case, _groups["tmd", purpose, case.ranks], rank, lay)
    theirs = run(case, _groups["gloo", purpose, case.ranks], rank, Tensor.clone)
    tolerance = TOLERANCE.get(case.dtype, 1e-9)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    digest = hashlib.sha256()
    for tensor in ours:
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    op = draw(st.sampled_from(sorted(RUNS)))
    size = draw(st.integers(1, WORLD))
    ranks = tuple(sorted(draw(st.permutations(range(WORLD)))[:size]))
    dtypes: tuple[torch.dtype, ...]
    if op in REDUCTIONS:
        reduce = draw(st.sampled_from(ARITHMETIC + BITWISE))
        dtypes = INTEGERS if reduce in BITWISE else FLOATS + INTEGERS
        if reduce == "SUM" and op in ("all_reduce", "reduce"):
            dtypes += COMPLEX
    else:
        reduce, dtypes = "SUM", (*FLOATS, *INTEGERS, torch.bool)
        if op in COMPLEX_MOVES:
            dtypes += COMPLEX
    small = st.lists(st.integers(0, 7), max_size=3).map(tuple)
    large = st.integers(1, 4000).map(lambda n: (n, 37))
    shape = draw(st.one_of(small, large))
    if op in JOINED and not shape:
        shape = (2,)
    row = st.tuples(*[st.integers(0, 4)] * WORLD)
    return Case(
        op=op,
        ranks=ranks,
        dtype=draw(st.sampled_from(dtypes)),
        shape=shape,
        reduce=reduce,
        root=draw(st.integers(0, size - 1)),
        strided=draw(st.booleans()) and bool(shape),
        splits=draw(st.tuples(*[row] * WORLD)),
        seed=draw(st.integers(0, 10_000)),
    )


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with pool(WORLD, str(tmp_path_factory.mktemp("gloo") / "store")) as made:
        made.run(start)
        yield made
        if not made.broken:
            made.run(stop)


SAME_ON_ALL = {"all_reduce", "all_reduce_async", "all_reduce_coalesced", "broadcast", "all_gather"}


@settings(
    max_examples=500,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[
        Phase.explicit,
        Phase.reuse,
        Phase.generate,
    ],  # a failure leaves the workers in an unknown state
)
@given(case=cases())
def test_collectives_equal_those_of_gloo(workers: Pool, case: Case) -> None:
    digests = [d for d in workers.run(compare, case) if d]
    if case.op in SAME_ON_ALL:
        assert len(set(digests)) == 1, "all ranks must hold the same bits"


AVERAGED = [torch.float32, torch.float64, torch.bfloat16]


def average(rank: int, size: int, store: dist.Store, dtype: torch.dtype, count: int) -> None:
    tensor = torch.full((count,), float(rank), dtype=dtype)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert torch.equal(tensor, torch.full_like(tensor, (size - 1) / 2))
    whole, piece = torch.full((count * size,), float(rank), dtype=dtype), tensor.clone()
    dist.reduce_scatter_tensor(piece, whole, dist.ReduceOp.AVG)
    assert torch.equal(piece, tensor)


@pytest.mark.parametrize("dtype", AVERAGED, ids=str)
@pytest.mark.parametrize("count", [3, 300_000])
def test_average_divides_by_the_group_size(workers: Pool, dtype: torch.dtype, count: int) -> None:
    assert workers.run(average, dtype, count) == [None] * WORLD


def anysource(rank: int, size: int, store: dist.Store) -> list[int]:
    if rank:
        dist.send(torch.tensor([rank]), 0)
        return []
    found = []
    for _ in range(size - 1):
        tensor = torch.zeros(1, dtype=torch.int64)
        assert dist.recv(tensor) == tensor.item()
        found.append(int(tensor))
    return sorted(found)


def test_receive_from_any_source(workers: Pool) -> None:
    assert workers.run(anysource)[0] == [1, 2, 3, 4]


def batch(rank: int, size: int, store: dist.Store) -> None:
    """Every rank to every other at once, with messages larger than any socket buffer."""
    out = [torch.zeros(1 << 20) for _ in range(size)]
    others = [r for r in range(size) if r != rank]
    own = torch.full((1 << 20,), float(rank))
    ops = [dist.P2POp(dist.isend, own, r) for r in others]
    ops += [dist.P2POp(dist.irecv, out[r], r) for r in others]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert [int(out[r][-1]) for r in others] == others


def test_batch_of_large_messages_does_not_deadlock(workers: Pool) -> None:
    assert workers.run(batch) == [None] * WORLD


def lists(rank: int, size: int, store: dist.Store) -> None:
    sent = [torch.full((rank + 1, r + 1), float(rank)) for r in range(size)]
    got = [torch.zeros(r + 1, rank + 1) for r in range(size)]
    dist.all_to_all(got, sent)
    assert all((t == r).all() for r, t in enumerate(got))


def test_all_to_all_of_lists(workers: Pool) -> None:
    assert workers.run(lists) == [None] * WORLD


def uneven(rank: int, size: int, store: dist.Store, lengths: tuple[int, ...]) -> None:
    key = ("tmd", "uneven", tuple(range(len(lengths))))
    if key not in _groups:
        _groups[key] = dist.new_group(list(range(len(lengths))), backend="tmd")
    if rank >= len(lengths):
        return
    got = [torch.zeros(length) for length in lengths]
    dist.all_gather(got, torch.full((lengths[rank],), rank + 1.0), group=_groups[key])
    assert all((t == r + 1).all() for r, t in enumerate(got))


@pytest.mark.parametrize("lengths", [(100, 40_000, 7), (40_000, 0, 7), (5, 0, 300)], ids=str)
def test_all_gather_of_uneven_parts(workers: Pool, lengths: tuple[int, ...]) -> None:
    """All ranks choose the same algorithm, also if the parts of only some are large."""
    assert workers.run(uneven, lengths) == [None] * WORLD


# --- every entry of torch.distributed, by the table of tests/fabric/entries.py -------------------

SOME = (1, 2, 4)
VARIANTS = (
    *(Variant(dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64)),
    *(Variant(dtype=dtype) for dtype in (torch.uint8, torch.bool, torch.complex64)),
    Variant(later=True),
    Variant(shape=(0, 2)),
    Variant(shape=(0, 2), later=True, ranks=SOME),
    Variant(shape=(5000, 20)),
    Variant(shape=(6,)),
    Variant(strided=True),
    Variant(strided=True, ranks=SOME, later=True, dtype=torch.float64),
)


def differences(at: At, run: Callable[[At], Pairs], who: str) -> list[str]:
    try:
        pairs = run(at)
    except Exception as error:
        return [f"{who}, rank {at.rank}, {at.variant}: {error!r}"]
    return [
        f"{who}, rank {at.rank}, {at.variant}: {got} instead of {wanted}"
        for got, wanted in pairs
        if not (torch.equal(got, wanted) if isinstance(got, Tensor) else got == wanted)
    ]


TABLE = (*ROWS, *FUNCTIONAL)
NAMES = [*map(str, ROWS), *(f"functional {row}" for row in FUNCTIONAL)]


def enter(rank: int, size: int, store: dist.Store, number: int) -> list[str]:
    """Run all variants of a row with both backends; returns what was wrong."""
    found = []
    row = TABLE[number]
    for variant in filter(row.fits, VARIANTS):
        for backend in ("tmd", "gloo") if row.gloo(variant) else ("tmd",):
            key = (backend, "entries", variant.ranks)
            if key not in _groups:
                _groups[key] = dist.new_group(list(variant.ranks), backend=backend)
            if rank in variant.ranks:
                found += differences(At(variant, _groups[key], rank), row.run, backend)
    return found


@pytest.mark.parametrize("number", range(len(TABLE)), ids=NAMES)
def test_every_entry_gives_the_result_of_its_row(workers: Pool, number: int) -> None:
    """tmd and Gloo both return what the row expects."""
    found = [line for lines in workers.run(enter, number) for line in lines]

    assert any(map(TABLE[number].fits, VARIANTS))
    assert not found, "\n".join(found[:5])


def test_every_public_function_has_a_row_or_a_reason() -> None:
    """A function of a later torch version is not forgotten."""
    rows = {row.name for row in ROWS}

    assert set(public()) - rows - set(EXCLUDED) == set()
    assert not rows & set(EXCLUDED)
    rows = {row.name for row in FUNCTIONAL}
    assert set(public_functional()) - rows - set(functional_entries.EXCLUDED) == set()
    assert not rows & set(functional_entries.EXCLUDED)


REFUSED = (
    (torch.float32, dist._make_nccl_premul_sum(2.0), "multiply the tensor first and use SUM"),
    (torch.float32, dist.ReduceOp.BAND, "needs integers or bool, not torch.float32: convert"),
    (torch.bool, dist.ReduceOp.AVG, "bool has no average: convert the tensor"),
    (torch.float8_e5m2, dist.ReduceOp.SUM, "of torch.float8_e5m2: convert the tensor"),
    (torch.complex64, dist.ReduceOp.MAX, "complex numbers have no order: use"),
)


def refused(rank: int, size: int, store: dist.Store, number: int) -> list[str]:
    dtype, op, _ = REFUSED[number]
    tensor, refusals = torch.zeros(5).to(dtype), []
    for call in (
        lambda: dist.reduce(tensor, 0, op),
        lambda: dist.reduce_scatter(tensor[:1], list(tensor.split(1)), op),
        lambda: dist.reduce_scatter_tensor(tensor[:1], tensor, op),
        *([] if dtype.is_complex else [lambda: dist.all_reduce(tensor, op)]),
    ):
        try:
            call()
        except ValueError as error:
            refusals.append(str(error))
    return refusals


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_an_unsupported_reduction_is_named_with_an_alternative(workers: Pool, number: int) -> None:
    """On all ranks alike, before anything is sent, so the group continues."""
    dtype, _, remedy = REFUSED[number]
    names = ["reduce", "reduce_scatter", "reduce_scatter"]
    names += [] if dtype.is_complex else ["all_reduce"]

    for refusals in workers.run(refused, number):
        assert [line.split()[0] for line in refusals] == names
        assert all(remedy in line for line in refusals), refusals


def sparse(rank: int, size: int, store: dist.Store) -> str:
    try:
        dist.all_reduce(torch.eye(2).to_sparse())
    except ValueError as error:
        return str(error)
    return ""


def test_a_sparse_tensor_is_refused_with_the_remedy(workers: Pool) -> None:
    assert all("all_reduce needs dense tensors: call to_dense()" in s for s in workers.run(sparse))
