"""One row for each collective of torch, in each form in which torch calls a group.

A row calls torch's public function and states the expected result explicitly, so that tmd, Gloo
and a standby's sandbox are compared with the same values. Values are small integers, whose sums
and products are exact in every type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.torch_version import TorchVersion

OLD = TorchVersion(torch.__version__) < "2.12"
"""Whether Gloo lacks ``all_to_all`` of lists, and functional collectives take only contiguous
tensors."""
Pairs = list[tuple[Any, Any]]
"""Actual and expected outcome of an operation."""


@dataclass(frozen=True)
class Variant:
    """Variations that must not change the outcome of an entry."""

    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (3, 2)
    strided: bool = False
    later: bool = False
    """The caller waits later (``async_op=True``)."""
    ranks: tuple[int, ...] = (0, 1, 2, 3, 4)

    def __str__(self) -> str:
        layout = "strided" if self.strided else "contiguous"
        return f"{self.dtype} {self.shape} {layout} later={self.later} ranks={self.ranks}"


class At:
    """One rank's position in a group."""

    def __init__(self, variant: Variant, group: dist.ProcessGroup, rank: int) -> None:
        self.variant, self.group, self.rank = variant, group, rank
        self.size = len(variant.ranks)
        self.place = variant.ranks.index(rank)
        self.root = self.size - 1
        """Position of the root; not 0, and not its global rank in a partial group."""
        self.root_rank = variant.ranks[self.root]
        self.everybody = range(self.size)

    def of(self, place: int, salt: int = 0, rows: int | None = None) -> Tensor:
        """The input of the rank in ``place``."""
        shape = self.variant.shape if rows is None else (rows, *self.variant.shape[1:])
        count = torch.Size(shape).numel()
        values = (torch.arange(count) + place + salt) % 3 + 1
        if self.variant.dtype == torch.bool:
            values = values > 1
        return values.reshape(shape).to(self.variant.dtype)

    def own(self, salt: int = 0, rows: int | None = None) -> Tensor:
        return self.lay(self.of(self.place, salt, rows))

    def room(self, rows: int | None = None) -> Tensor:
        """A tensor to fill: none of its content may remain."""
        return self.lay(torch.zeros_like(self.of(0, 0, rows)))

    def lay(self, tensor: Tensor) -> Tensor:
        if not self.variant.strided:
            return tensor.clone()
        wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
        wide[..., 0] = tensor
        return wide[..., 0]

    def all(self, salt: int = 0) -> list[Tensor]:
        return [self.of(place, salt) for place in self.everybody]

    def sum(self, salt: int = 0) -> Tensor:
        return torch.stack(self.all(salt)).sum(0).to(self.variant.dtype)

    def options(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.variant.later}

    def settle(self, work: Any) -> None:
        """Wait as the caller must: for a work, or for the future of a coalesced call."""
        if self.variant.later:
            work.wait()
        else:
            assert work is None


Run = Callable[[At], Pairs]
Fits = Callable[[Variant], bool]


def always(_: Variant) -> bool:
    return True


def never(_: Variant) -> bool:
    return False


def plain(variant: Variant) -> bool:
    return not variant.strided


def numbers(variant: Variant) -> bool:
    return variant.dtype != torch.bool


def real(variant: Variant) -> bool:
    return not variant.dtype.is_complex


@dataclass(frozen=True)
class Row:
    """``name`` is the public function; ``fits``: the variants that make sense, ``gloo``: those that
    Gloo supports, too."""

    name: str
    form: str
    run: Run
    fits: Fits = always
    gloo: Fits = plain

    def __str__(self) -> str:
        return f"{self.name} {self.form}".strip()


ROWS: list[Row] = []


def row(name: str, form: str = "", **limits: Fits) -> Callable[[Run], Run]:
    """A row of the table, if this version of torch has the function."""

    def add(run: Run) -> Run:
        if hasattr(dist, name):
            ROWS.append(Row(name, form, run, **limits))
        return run

    return add


def both(*limits: Fits) -> Fits:
    return lambda variant: all(limit(variant) for limit in limits)


# --- reductions -----------------------------------------------------------------------------------


@row("all_reduce", fits=numbers)
def all_reduce(at: At) -> Pairs:
    tensor = at.own()
    at.settle(dist.all_reduce(tensor, **at.options()))
    return [(tensor, at.sum())]


@row(
    "all_reduce",
    "of flags",
    fits=lambda v: v.dtype in (torch.bool, torch.uint8),
    gloo=both(plain, real),
)
def all_reduce_flags(at: At) -> Pairs:
    tensor, largest = at.own(), at.own()
    at.settle(dist.all_reduce(tensor, dist.ReduceOp.BOR, **at.options()))
    at.settle(dist.all_reduce(largest, dist.ReduceOp.MAX, **at.options()))
    every = torch.stack(at.all())
    whole = every[0].clone()
    for part in every[1:]:
        whole |= part
    return [(tensor, whole), (largest, every.amax(0) if every.numel() else whole)]


@row("all_reduce_coalesced", fits=numbers)
def all_reduce_coalesced(at: At) -> Pairs:
    tensors = [at.own(), at.own(1, 5)]
    at.settle(dist.all_reduce_coalesced(tensors, **at.options()))
    second = torch.stack([at.of(p, 1, 5) for p in at.everybody]).sum(0).to(at.variant.dtype)
    return [(tensors[0], at.sum()), (tensors[1], second)]


@row("all_reduce", "in a coalescing manager", fits=numbers)
def all_reduce_managed(at: At) -> Pairs:
    tensors = [at.own(), at.own(1)]
    with dist._coalescing_manager(at.group, async_ops=at.variant.later) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=at.group)
    if at.variant.later:
        manager.wait()
    return [(tensors[0], at.sum()), (tensors[1], at.sum(1))]


@row("reduce", fits=numbers)
def reduce(at: At) -> Pairs:
    tensor = at.own()
    at.settle(dist.reduce(tensor, at.root_rank, **at.options()))
    return [(tensor, at.sum())] if at.place == at.root else []


@row("reduce_scatter", fits=numbers)
def reduce_scatter(at: At) -> Pairs:
    out = at.room()
    given = [at.own(place) for place in at.everybody]
    at.settle(dist.reduce_scatter(out, given, **at.options()))
    return [(out, at.sum(at.place))]


@row("reduce_scatter", "of uneven parts", fits=numbers, gloo=never)
def reduce_scatter_uneven(at: At) -> Pairs:
    out = at.room(at.place)
    given = [at.own(rows=place) for place in at.everybody]
    at.settle(dist.reduce_scatter(out, given, **at.options()))
    whole = torch.stack([at.of(p, rows=at.place) for p in at.everybody]).sum(0)
    return [(out, whole.to(at.variant.dtype))]


def scattered(at: At) -> tuple[Tensor, Tensor, Tensor]:
    """Output, input, and the expected output."""
    whole = torch.cat([at.own(place) for place in at.everybody])
    return at.room(), at.lay(whole), at.sum(at.place)


@row("reduce_scatter_tensor", fits=numbers)
def reduce_scatter_tensor(at: At) -> Pairs:
    out, whole, wanted = scattered(at)
    at.settle(dist.reduce_scatter_tensor(out, whole, **at.options()))
    return [(out, wanted)]


@row("reduce_scatter_single", fits=numbers)
def reduce_scatter_single(at: At) -> Pairs:
    out, whole, wanted = scattered(at)
    at.settle(getattr(dist, "reduce_scatter_single")(out, whole, **at.options()))  # noqa: B009
    return [(out, wanted)]


@row("reduce_scatter_tensor", "in a coalescing manager", fits=numbers)
def reduce_scatter_managed(at: At) -> Pairs:
    calls = [scattered(at), scattered(at)]
    with dist._coalescing_manager(at.group, async_ops=at.variant.later) as manager:
        for out, whole, _ in calls:
            dist.reduce_scatter_tensor(out, whole, group=at.group)
    if at.variant.later:
        manager.wait()
    return [(out, wanted) for out, _, wanted in calls]


# --- moving data ----------------------------------------------------------------------------------


@row("broadcast")
def broadcast(at: At) -> Pairs:
    tensor = at.own()
    at.settle(dist.broadcast(tensor, at.root_rank, **at.options()))
    return [(tensor, at.of(at.root))]


@row("all_gather")
def all_gather(at: At) -> Pairs:
    out = [at.room() for _ in at.everybody]
    at.settle(dist.all_gather(out, at.own(), **at.options()))
    return list(zip(out, at.all(), strict=True))


@row("all_gather", "of uneven parts", gloo=never)
def all_gather_uneven(at: At) -> Pairs:
    out = [at.room(place) for place in at.everybody]
    at.settle(dist.all_gather(out, at.own(rows=at.place), **at.options()))
    return [(t, at.of(p, rows=p)) for p, t in enumerate(out)]


@row("all_gather_coalesced")
def all_gather_coalesced(at: At) -> Pairs:
    """Two tensors, so that one list per rank differs from one per tensor."""
    out = [[at.room(), at.room(4)] for _ in at.everybody]
    at.settle(dist.all_gather_coalesced(out, [at.own(), at.own(1, 4)], **at.options()))
    wanted = [(at.of(p), at.of(p, 1, 4)) for p in at.everybody]
    return [
        pair for got, all_ in zip(out, wanted, strict=True) for pair in zip(got, all_, strict=True)
    ]


def gathered(at: At) -> tuple[Tensor, Tensor, Tensor]:
    whole = torch.cat(at.all())
    return at.lay(torch.zeros_like(whole)), at.own(), whole


@row("all_gather_into_tensor")
def all_gather_into_tensor(at: At) -> Pairs:
    out, own, wanted = gathered(at)
    at.settle(dist.all_gather_into_tensor(out, own, **at.options()))
    return [(out, wanted)]


@row("all_gather_single")
def all_gather_single(at: At) -> Pairs:
    out, own, wanted = gathered(at)
    at.settle(getattr(dist, "all_gather_single")(out, own, **at.options()))  # noqa: B009
    return [(out, wanted)]


@row("all_gather_into_tensor", "in a coalescing manager")
def all_gather_managed(at: At) -> Pairs:
    calls = [gathered(at), gathered(at)]
    with dist._coalescing_manager(at.group, async_ops=at.variant.later) as manager:
        for out, own, _ in calls:
            dist.all_gather_into_tensor(out, own, group=at.group)
    if at.variant.later:
        manager.wait()
    return [(out, wanted) for out, _, wanted in calls]


@row("gather", gloo=both(plain, real))
def gather(at: At) -> Pairs:
    out = [at.room() for _ in at.everybody] if at.place == at.root else None
    at.settle(dist.gather(at.own(), out, at.root_rank, **at.options()))
    return list(zip(out or [], at.all() if out else [], strict=True))


@row("gather_single", gloo=never)
def gather_single(at: At) -> Pairs:
    out, own, wanted = gathered(at)
    into = out if at.place == at.root else None
    at.settle(getattr(dist, "gather_single")(own, into, at.root_rank, **at.options()))  # noqa: B009
    return [] if into is None else [(into, wanted)]


@row("scatter")
def scatter(at: At) -> Pairs:
    out = at.room()
    given = [at.own(p) for p in at.everybody] if at.place == at.root else None
    at.settle(dist.scatter(out, given, at.root_rank, **at.options()))
    return [(out, at.of(at.root, at.place))]


@row("all_to_all", gloo=never if OLD else plain)
def all_to_all(at: At) -> Pairs:
    out = [at.room() for _ in at.everybody]
    at.settle(dist.all_to_all(out, [at.own(p) for p in at.everybody], **at.options()))
    return [(t, at.of(p, at.place)) for p, t in enumerate(out)]


@row("all_to_all", "of uneven parts", gloo=never)
def all_to_all_lists(at: At) -> Pairs:
    """Uneven: the part from one position to another has as many rows as the sum of both numbers."""
    out = [at.room(at.place + p) for p in at.everybody]
    given = [at.own(p, at.place + p) for p in at.everybody]
    at.settle(dist.all_to_all(out, given, **at.options()))
    return [(t, at.of(p, at.place, at.place + p)) for p, t in enumerate(out)]


@row("all_to_all_single")
def all_to_all_single(at: At) -> Pairs:
    given = at.lay(torch.cat([at.own(p) for p in at.everybody]))
    out = at.lay(torch.zeros_like(given))
    at.settle(dist.all_to_all_single(out, given, **at.options()))
    return [(out, torch.cat([at.of(p, at.place) for p in at.everybody]))]


@row("all_to_all_single", "of uneven parts")
def all_to_all_uneven(at: At) -> Pairs:
    rows = [at.place + p for p in at.everybody]
    given = at.lay(torch.cat([at.own(p, n) for p, n in enumerate(rows)]))
    wanted = torch.cat([at.of(p, at.place, n) for p, n in enumerate(rows)])
    out = at.lay(torch.zeros_like(wanted))
    at.settle(dist.all_to_all_single(out, given, rows, rows, **at.options()))
    return [(out, wanted)]


# --- messages -------------------------------------------------------------------------------------


def neighbours(at: At) -> tuple[int, int, Tensor]:
    """The next rank, the previous one, and what that one sends."""
    ranks, before = at.variant.ranks, (at.place - 1) % at.size
    return ranks[(at.place + 1) % at.size], ranks[before], at.of(before)


@row("isend")
@row("irecv")
def messages(at: At) -> Pairs:
    up, down, wanted = neighbours(at)
    out = at.room()
    works = [dist.irecv(out, down, group=at.group), dist.isend(at.own(), up, group=at.group)]
    for work in works:
        work.wait()
    return [(out, wanted)]


@row("send")
@row("recv")
def waiting_messages(at: At) -> Pairs:
    """From the first position to the last: the other ranks take no part."""
    if at.place == 0:
        dist.send(at.own(), at.root_rank, group=at.group)
    if at.place != at.root:
        return []
    out = at.room()
    first = at.variant.ranks[0]
    return [(dist.recv(out, first, group=at.group), first), (out, at.of(0))]


@row("batch_isend_irecv", fits=real)
def batch(at: At) -> Pairs:
    up, down, wanted = neighbours(at)
    out = at.room()
    ops = [
        dist.P2POp(dist.isend, at.own(), up, at.group),
        dist.P2POp(dist.irecv, out, down, at.group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [(out, wanted)]


@row("batch_isend_irecv", "of two ranks in a coalescing manager", gloo=never)
def managed_messages(at: At) -> Pairs:
    """As torch does it for NCCL. The manager ends for two ranks: it is not a collective."""
    tensor, out, pair = at.own(), at.room(), (0, at.root)
    if at.place in pair:
        other = at.variant.ranks[pair[at.place == 0]]
        with dist._coalescing_manager(at.group, torch.device("cpu"), async_ops=True) as manager:
            dist.irecv(out, other, group=at.group)
            dist.isend(tensor, other, group=at.group)
        manager.wait()
    sum_ = torch.ones(1)
    dist.all_reduce(sum_, group=at.group)
    wanted = at.of(pair[at.place == 0]) if at.place in pair else at.room()
    return [(out, wanted), (sum_, torch.tensor([float(at.size)]))]


# --- objects --------------------------------------------------------------------------------------


def thing(place: int) -> dict[str, Any]:
    """An object of a different size on each rank."""
    return {"place": place, "text": "x" * 10 * place}


@row("all_gather_object")
def all_gather_object(at: At) -> Pairs:
    out: list[Any] = [None] * at.size
    dist.all_gather_object(out, thing(at.place), group=at.group)
    return [(out, [thing(p) for p in at.everybody])]


@row("gather_object")
def gather_object(at: At) -> Pairs:
    out: list[Any] | None = [None] * at.size if at.place == at.root else None
    dist.gather_object(thing(at.place), out, at.root_rank, group=at.group)
    return [] if out is None else [(out, [thing(p) for p in at.everybody])]


@row("broadcast_object_list")
def broadcast_object_list(at: At) -> Pairs:
    objects = [thing(at.place), at.place]
    dist.broadcast_object_list(objects, at.root_rank, group=at.group)
    return [(objects, [thing(at.root), at.root])]


@row("scatter_object_list")
def scatter_object_list(at: At) -> Pairs:
    given = [thing(p) for p in at.everybody] if at.place == at.root else None
    out: list[Any] = [None]
    dist.scatter_object_list(out, given, at.root_rank, group=at.group)
    return [(out, [thing(at.place)])]


@row("send_object_list")
@row("recv_object_list")
def object_messages(at: At) -> Pairs:
    if at.place == 0:
        dist.send_object_list([thing(7), 7], at.root_rank, group=at.group)
    if at.place != at.root:
        return []
    out: list[Any] = [None, None]
    dist.recv_object_list(out, at.variant.ranks[0], group=at.group)
    return [(out, [thing(7), 7])]


@row("barrier")
def barrier(at: At) -> Pairs:
    at.settle(dist.barrier(**at.options()))
    return []


EXCLUDED: dict[str, str] = {
    "monitored_barrier": "torch itself refuses it for every backend but Gloo",
    "split_group": "torch itself asks for an accelerator and a backend that splits",
    "shrink_group": "torch itself asks for a backend that shrinks",
    "gather_into_tensor": "the former name of gather_single",
    "set_timeout": "of later operations; test_patience.py",
    "record_comm": "names operations for the profiler",
    "new_group": "makes a group; test_grouping.py and all rows in groups of some ranks",
    "new_subgroups": "calls new_group",
    "new_subgroups_by_enumeration": "calls new_group",
    "init_process_group": "the start; every test",
    "destroy_process_group": "the end; every test",
    "rendezvous": "finds the store",
    "register_rendezvous_handler": "finds the store",
    "init_device_mesh": "makes groups; test_layouts.py",
    "breakpoint": "a debugger",
    "GroupName": "a type",
}
"""Public functions without a row, and why."""

ASKING = ("get_", "is_", "supports_", "set_debug_level")
"""Prefixes of functions that only return information."""


def public(module: Any = dist) -> Sequence[str]:
    """Functions of ``torch.distributed`` that a script may call on a group."""
    return [
        name
        for name in dir(module)
        if not name.startswith(("_", *ASKING))
        and callable(getattr(module, name))
        and not isinstance(getattr(module, name), type)
        and getattr(module, name).__module__.startswith("torch.distributed")
    ]
