"""The layout of a state: a tree of names, shapes, dtypes and plain values.

A state is a *layout*, which msgpack can encode, and the tensors that it names, in order. There is
no pickle: a value that is neither a tensor nor plain cannot move, nor can such a key of a dict, and
:func:`flatten` reports its path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from tmd.core.values.errors import StateMismatch
from tmd.trainer.state.dtensors import local_part

PLAIN = (type(None), bool, int, float, str, bytes)
PAIRS = {"dict": "pairs", "counter": "counted pairs"}
"""By kind of a dict, its kind if not all keys are strings or ints: its items are then tuples of key
and value."""


class TensorSpec(Struct, frozen=True, tag="tensor", array_like=True):
    """Represents a tensor in a layout."""

    shape: tuple[int, ...]
    dtype: str


class Node(Struct, frozen=True, tag="node", array_like=True):
    """A container in a layout, or an int that msgpack cannot hold. Only dicts whose keys are all
    strings or ints have ``keys``."""

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
        StateMismatch: a value is neither tensor, container nor plain, or a key of a dict is neither
            plain nor a tuple of such; the message has the path.
    """
    if isinstance(value, Tensor):
        own = local_part(value)
        return spec_of(own), [own]
    if isinstance(value, PLAIN):
        return _leaf(value), []
    if isinstance(value, Mapping):
        parts = [flatten(v, f"{path}.{k}") for k, v in value.items()]
        node = _mapping(value, [layout for layout, _ in parts], path)
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


def _mapping(value: Mapping[Any, Any], items: Sequence[Layout], path: str) -> Node:
    kind = "counter" if isinstance(value, Counter) else "dict"
    keys = [_key(key, path) for key in value]
    plain = [key.value for key in keys if isinstance(key, Leaf) and type(key.value) in (str, int)]
    if len(plain) == len(keys):
        return Node(kind, tuple(plain), tuple(items))
    # msgpack would change some of these keys, or refuse them.
    pairs = zip(keys, items, strict=True)
    return Node(PAIRS[kind], None, tuple(Node("tuple", None, pair) for pair in pairs))


def _key(key: Any, path: str) -> Layout:
    if isinstance(key, PLAIN):
        return _leaf(key)
    if isinstance(key, tuple):
        return Node("tuple", None, tuple(_key(each, path) for each in key))
    raise StateMismatch(
        f"{path or 'state'} has a key that is a {type(key).__name__}, but only strings, numbers, "
        "other plain values and tuples of these can be keys of what moves with a rank: convert it "
        "in state_dict() and back in load_state_dict()"
    )


def _leaf(value: Any) -> Layout:
    """A plain value as its base type: msgpack does not know subclasses, such as numpy's float64."""
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
    if layout.kind in PAIRS.values():
        return Counter(dict(items)) if layout.kind == PAIRS["counter"] else dict(items)
    return items if layout.kind == "list" else tuple(items)


def spec_of(tensor: Tensor) -> TensorSpec:
    """The layout of a tensor that is not distributed."""
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype))


def specs(layout: Layout) -> list[TensorSpec]:
    """The tensors a layout names, in order."""
    if isinstance(layout, TensorSpec):
        return [layout]
    if isinstance(layout, Leaf):
        return []
    return [spec for item in layout.items for spec in specs(item)]


def named(layout: Layout, path: str) -> Iterator[tuple[str, TensorSpec]]:
    """The tensors a layout names, in order, each with its path, which begins with ``path``."""
    if isinstance(layout, TensorSpec):
        yield path, layout
    elif isinstance(layout, Node):
        keys: Iterable[Any] = layout.keys if layout.keys is not None else range(len(layout.items))
        for key, item in zip(keys, layout.items, strict=True):
            yield from named(item, f"{path}.{key}")


def undivided(value: Any) -> Iterator[Tensor]:
    """The tensors of :func:`flatten`, in its order, as ``value`` has them: not only the parts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from undivided(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from undivided(item)


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """The torch dtype named by ``spec``."""
    dtype = getattr(torch, spec.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise StateMismatch(f"unknown dtype {spec.dtype!r} announced by the source")
    return dtype
