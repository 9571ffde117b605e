"""Finds the buffers of modules, and compares and copies many tensors, with one wait for a device
instead of one for each tensor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tmd.fabric import device
from tmd.trainer.state.digests import raws


class BufferSlot(NamedTuple):
    """A name of a buffer in a module."""

    path: str
    """Its name from the outermost module on."""
    owner: nn.Module
    """The module that has it."""
    name: str
    """Its name there."""
    held: Tensor | None
    """The buffer, once there is one."""


def slots(module: nn.Module) -> Iterator[BufferSlot]:
    """All names of buffers in ``module``, with a buffer or without."""
    for prefix, owner in module.named_modules():
        for name, held in owner._buffers.items():
            yield BufferSlot(f"{prefix}.{name}" if prefix else name, owner, name, held)


def version(tensor: Tensor) -> int:
    """Counts what is written to ``tensor``; always 0 for one of inference mode, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def differing(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> set[str]:
    """Names of tensors in ``before`` that are not equal to those in ``now``, or not there any more.
    NaN equals nothing."""
    found, comparable = set(), []
    for name, old in before.items():
        new = now.get(name)
        if new is None or (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
            found.add(name)
        elif device.current().holds(new):
            comparable.append(name)
        elif not torch.equal(old, new):
            found.add(name)
    for names in _by_device(comparable, now):
        flags = torch.stack([(before[name] != now[name]).any() for name in names])
        seen = device.current().on_host(flags).tolist()
        found |= {name for name, differs in zip(names, seen, strict=True) if differs}
    return found


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same values. NaN equals NaN: it is no change."""
    if torch.equal(one, other):
        return True
    return one.shape == other.shape and bool(
        ((one == other) | ((one != one) & (other != other))).all()
    )


def bytes_of(tensors: Mapping[str, Tensor]) -> dict[str, memoryview]:
    """The bytes of each tensor, in the order of ``tensors``.

    The bytes of a tensor in host memory are a view of it: use them before it changes.
    """
    return dict(zip(tensors, raws(tensors.values()), strict=True))


def _by_device(names: Iterable[str], tensors: Mapping[str, Tensor]) -> list[list[str]]:
    groups: dict[torch.device, list[str]] = defaultdict(list)
    for name in names:
        groups[tensors[name].device].append(name)
    return list(groups.values())
