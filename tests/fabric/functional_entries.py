"""Rows for torch's functional collectives, which call a group from C++; see ``entries.py``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from tests.fabric.entries import (
    OLD,
    At,
    Fits,
    Pairs,
    Row,
    Run,
    Variant,
    always,
    both,
    numbers,
    plain,
    real,
)

FUNCTIONAL: list[Row] = []


def row(name: str, form: str = "", **limits: Fits) -> Callable[[Run], Run]:
    """Old names warn about the new ones."""

    def add(run: Run) -> Run:
        @wraps(run)
        def quietly(at: At) -> Pairs:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                return run(at)

        if hasattr(functional, name):
            fits = limits.pop("fits", always)
            whole = both(fits, plain) if OLD else fits
            FUNCTIONAL.append(Row(name, form, quietly, whole, **limits))
        return run

    return add


def done(result: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Plain tensors, once complete."""
    results = [result] if isinstance(result, Tensor) else result
    return [functional.wait_tensor(tensor).clone() for tensor in results]


def call(name: str, *args: Any) -> list[Tensor]:
    return done(getattr(functional, name)(*args))


@row("all_reduce", fits=both(numbers, real))
@row("wait_tensor", fits=both(numbers, real))
def all_reduce(at: At) -> Pairs:
    return list(zip(call("all_reduce", at.own(), "sum", at.group), [at.sum()], strict=True))


@row("all_reduce_inplace", fits=both(numbers, real))
def all_reduce_inplace(at: At) -> Pairs:
    tensor = at.own()
    functional.all_reduce_inplace(tensor, "sum", at.group)
    return [(tensor, at.sum())]


@row("all_reduce_coalesced", fits=both(numbers, real))
def all_reduce_coalesced(at: At) -> Pairs:
    found = call("all_reduce_coalesced", [at.own(), at.own(1)], "sum", at.group)
    return list(zip(found, [at.sum(), at.sum(1)], strict=True))


@row("wait_tensors", fits=both(numbers, real))
def wait_tensors(at: At) -> Pairs:
    tensors = [at.own(), at.own(1)]
    reduced = functional.all_reduce_coalesced(tensors, "sum", at.group)
    # New in torch 2.15.
    found = [tensor.clone() for tensor in getattr(functional, "wait_tensors")(list(reduced))]  # noqa: B009
    return list(zip(found, [at.sum(), at.sum(1)], strict=True))


def gathering(name: str, **limits: Fits) -> None:
    @row(name, **limits)  # type: ignore[arg-type]
    def gather(at: At) -> Pairs:
        return list(zip(call(name, at.own(), 0, at.group), [torch.cat(at.all())], strict=True))


for each in ("all_gather_single", "all_gather_tensor"):
    gathering(each, fits=real)
    gathering(f"{each}_autograd", fits=both(real, lambda v: v.dtype.is_floating_point))


def gathering_several(name: str) -> None:
    @row(name, fits=real)
    def gather(at: At) -> Pairs:
        found = call(name, [at.own(), at.own(1)], at.group)
        return list(zip(found, [torch.cat(at.all()), torch.cat(at.all(1))], strict=True))


for each in ("all_gather_single_coalesced", "all_gather_into_tensor_coalesced"):
    gathering_several(each)


@row("all_gather_inplace", fits=real)
def all_gather_inplace(at: At) -> Pairs:
    out = [at.room() for _ in at.everybody]
    functional.all_gather_inplace(out, at.own(), at.group)
    return list(zip(out, at.all(), strict=True))


@row("all_gather_tensor_inplace", fits=real)
def all_gather_tensor_inplace(at: At) -> Pairs:
    wanted = torch.cat(at.all())
    out = torch.zeros_like(wanted)
    functional.all_gather_tensor_inplace(out, at.own(), at.group)
    return [(out, wanted)]


def parts(at: At) -> Tensor:
    return at.lay(torch.cat([at.own(place) for place in at.everybody]))


def scattering(name: str, fits: Fits) -> None:
    @row(name, fits=fits)
    def scatter(at: At) -> Pairs:
        return list(zip(call(name, parts(at), "sum", 0, at.group), [at.sum(at.place)], strict=True))


for each in ("reduce_scatter_single", "reduce_scatter_tensor"):
    scattering(each, both(numbers, real))
    scattering(f"{each}_autograd", both(numbers, real, lambda v: v.dtype.is_floating_point))


def scattering_several(name: str) -> None:
    @row(name, fits=both(numbers, real))
    def scatter(at: At) -> Pairs:
        found = call(name, [parts(at), parts(at)], "sum", [0, 0], at.group)
        return list(zip(found, [at.sum(at.place)] * 2, strict=True))


for each in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"):
    scattering_several(each)


@row("reduce_scatter_tensor_inplace", fits=both(numbers, real))
def reduce_scatter_tensor_inplace(at: At) -> Pairs:
    out = at.room()
    functional.reduce_scatter_tensor_inplace(out, parts(at), "sum", at.group)
    return [(out, at.sum(at.place))]


@row("reduce_scatter_inplace", fits=both(numbers, real))
def reduce_scatter_inplace(at: At) -> Pairs:
    out = at.room()
    given = [at.own(place) for place in at.everybody]
    getattr(functional, "reduce_scatter_inplace")(out, given, "sum", at.group)  # noqa: B009
    return [(out, at.sum(at.place))]


def exchanging(name: str, fits: Fits) -> None:
    @row(name, "of uneven parts", fits=fits)
    def exchange(at: At) -> Pairs:
        rows = [at.place + p for p in at.everybody]
        given = at.lay(torch.cat([at.own(p, n) for p, n in enumerate(rows)]))
        wanted = torch.cat([at.of(p, at.place, n) for p, n in enumerate(rows)])
        return list(zip(call(name, given, rows, rows, at.group), [wanted], strict=True))


exchanging("all_to_all_single", real)
exchanging("all_to_all_single_autograd", both(real, lambda v: v.dtype.is_floating_point))


@row("all_to_all_inplace", fits=real)
def all_to_all_inplace(at: At) -> Pairs:
    given = parts(at)
    out = torch.zeros_like(given)
    functional.all_to_all_inplace(out, given, None, None, at.group)
    return [(out, torch.cat([at.of(p, at.place) for p in at.everybody]))]


@row("broadcast", fits=real)
def broadcast(at: At) -> Pairs:
    return list(zip(call("broadcast", at.own(), at.root, at.group), [at.of(at.root)], strict=True))


@row("permute_tensor", fits=lambda v: plain(v) and real(v) and len(v.shape) == 1)
def permute_tensor(at: At) -> Pairs:
    """Each rank sends to the previous one."""
    target = [(place - 1) % at.size for place in at.everybody]
    found = call("permute_tensor", at.own(), target, at.group)
    return list(zip(found, [at.of((at.place + 1) % at.size)], strict=True))


def whole(variant: Variant) -> bool:
    """torch passes a global rank on as a group rank, to Gloo as well."""
    return variant.ranks == Variant().ranks


@row("isend_inplace", fits=both(real, whole))
@row("irecv_inplace", fits=both(real, whole))
def messages(at: At) -> Pairs:
    ranks, before = at.variant.ranks, (at.place - 1) % at.size
    out = at.room()
    received = functional.irecv_inplace(out, ranks[before], 0, at.group)
    sent = functional.isend_inplace(at.own(), ranks[(at.place + 1) % at.size], 0, at.group)
    functional.wait_tensor(sent)
    functional.wait_tensor(received)
    return [(out, at.of(before))]


EXCLUDED = {
    "batch_p2p_ops_inplace": "torch asks for a backend in C++; batch_isend_irecv is in the table"
}
HELPERS = ("_backward", "_setup_context", "_ctx")


def public_functional() -> list[str]:
    """Functions that a script may call; the others serve autograd and the compiler."""
    return [
        name
        for name, found in vars(functional).items()
        if not name.startswith("_")
        and not name.endswith(HELPERS)
        and getattr(found, "__module__", "") == functional.__name__
        and callable(found)
        and not isinstance(found, type)
    ]
