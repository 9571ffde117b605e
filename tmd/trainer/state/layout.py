"""The layout of a state: a tree of names, shapes, dtypes and plain values.

A state is a *layout*, which msgpack can encode, and the tensors that it names, in order. There is
no pickle: a value that is neither a tensor nor plain cannot move, and :func:`flatten` reports its
path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from tmd.core.values.errors import StateMismatch
from tmd.trainer.state.dtensors import part

PLAIN = (type(None), bool, int, float, str, bytes)


class TensorSpec(Struct, frozen=True, tag="tensor", array_like=True):
    """Represents a tensor in a layout."""

    shape: tuple[int, ...]
    dtype: str


class Node(Struct, frozen=True, tag="node", array_like=True):
    """A container in a layout; ``keys`` are ``None`` for a list or tuple."""

    kind: str
    keys: tuple[str | int, ...] | None
    items: tuple[TensorSpec | Node | Leaf, ...]


class Leaf(Struct, frozen=True, tag="leaf", array_like=True):
    """A plain value in a layout."""

    value: Any


Layout = TensorSpec | Node | Leaf
Layouts = dict[str, Layout]


def flatten(value: Any, path: str = "") -> tuple[Layout, list[Tensor]]:
    """Layout and tensors of a nested state dict; of a distributed tensor only the local part.

    Raises:
        StateMismatch: a value is neither tensor, container nor plain; the message has its path.
    """
    if isinstance(value, Tensor):
        own = part(value)
        return TensorSpec(tuple(own.shape), str(own.dtype)), [own]
    if isinstance(value, PLAIN):
        return _leaf(value), []
    if isinstance(value, Mapping):
        parts = [flatten(v, f"{path}.{k}") for k, v in value.items()]
        kind = "counter" if isinstance(value, Counter) else "dict"
        node = Node(kind, tuple(value.keys()), tuple(layout for layout, _ in parts))
    elif isinstance(value, list | tuple):
        parts = [flatten(v, f"{path}[{i}]") for i, v in enumerate(value)]
        kind = "list" if isinstance(value, list) else "tuple"
        node = Node(kind, None, tuple(layout for layout, _ in parts))
    else:
        raise StateMismatch(
            f"{path or 'state'} is a {type(value).__name__}, but only tensors, containers "
            "and plain values can move with a rank: leave it out of state_dict() or convert it"
        )
    return node, [tensor for _, tensors in parts for tensor in tensors]


def _leaf(value: Any) -> Layout:
    """A plain value without a subclass, such as numpy's float64, which msgpack does not know."""
    match value:
        case bool():
            pass
        case int():
            value = int(value)
        case float():
            value = float(value)
        case str():
            value = str.__str__(value)  # str() may give the name of an enumeration
        case bytes():
            value = bytes(value)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return Node("int", None, (Leaf(hex(value)),))
    return Leaf(value)


def unflatten(layout: Layout, tensors: Iterator[Tensor]) -> Any:
    """The inverse of :func:`flatten`. Plain values come back without their subclass."""
    if isinstance(layout, TensorSpec):
        return next(tensors)
    if isinstance(layout, Leaf):
        return layout.value
    items = [unflatten(item, tensors) for item in layout.items]
    if layout.keys is not None:
        found = dict(zip(layout.keys, items, strict=True))
        return Counter(found) if layout.kind == "counter" else found
    if layout.kind == "int":
        return int(items[0], 16)
    return items if layout.kind == "list" else tuple(items)


def specs(layout: Layout) -> list[TensorSpec]:
    """The tensors a layout names, in order."""
    if isinstance(layout, TensorSpec):
        return [layout]
    if isinstance(layout, Leaf):
        return []
    return [spec for item in layout.items for spec in specs(item)]


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """The torch dtype named by ``spec``."""
    dtype = getattr(torch, spec.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise StateMismatch(f"unknown dtype {spec.dtype!r} announced by the source")
    return dtype
