"""A batch that may be given out a second time, if its step is repeated.

A script may take entries out of a batch, and change its tensors in place. The repeated step must
get the batch as it was drawn.
"""

from __future__ import annotations

import copy
import logging
from collections import UserDict
from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tmd.trainer.state.buffers import equal, version

SMALL = 1 << 20
"""Bytes. The tensors of a smaller batch are always copied, which takes less than a millisecond."""
SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})

log = logging.getLogger("tmd.trainer")


class DrawnBatch:
    """A batch as the loader gave it."""

    def __init__(self, batch: Any, *, copied: bool) -> None:
        """``copied``: keep a copy of its tensors, however large they are."""
        self._new: Any = batch
        self._is_new = True
        containers = _Containers({})
        self._batch = containers.copied(batch)
        found = containers.tensors
        copied = copied or sum(t.nbytes for t in found if _is_dense(t)) <= SMALL
        self._tensors = [_DrawnTensor.of(tensor, copied=copied) for tensor in found]

    @property
    def is_intact(self) -> bool:
        """Whether its tensors are as they were drawn, as far as torch counts changes in place."""
        return all(each.is_intact for each in self._tensors)

    @property
    def is_lost(self) -> bool:
        """Whether a tensor has changed of which there is no copy: the batch must be drawn again."""
        return not all(each.copy is not None or each.is_intact for each in self._tensors)

    def given(self) -> Any:
        """The batch for the script. At first this is what the loader gave; later the same tensors,
        as they were drawn, in other containers."""
        if self._is_new:
            batch, self._new, self._is_new = self._new, None, False
            return batch
        return _Containers({id(t.tensor): t.as_drawn() for t in self._tensors}).copied(self._batch)


class _DrawnTensor(NamedTuple):
    """A tensor of a batch, and how it was drawn."""

    tensor: Tensor
    version: int
    requires_grad: bool
    copy: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor, *, copied: bool) -> _DrawnTensor:
        kept = _copy_of(tensor) if copied and _is_dense(tensor) else None
        return cls(tensor, version(tensor), tensor.requires_grad, kept)

    @property
    def is_intact(self) -> bool:
        return version(self.tensor) == self.version

    def as_drawn(self) -> Tensor:
        """The tensor with its first values. They are put back in place where that is possible:
        another tensor of the batch, or of the loader, may be a view of the same memory."""
        found = self.tensor
        if self.copy is not None and not self._put_back(self.copy):
            found = self.copy.clone()
        # The script may have asked for a gradient, and the broken step has left one.
        return found.detach() if found.requires_grad and not self.requires_grad else found

    def _put_back(self, values: Tensor) -> bool:
        """Let the tensor have ``values``; returns whether it could be done in place."""
        tensor = self.tensor
        kinds = [(t.shape, t.dtype, t.device) for t in (tensor, values)]
        if kinds[0] != kinds[1]:
            return False
        try:
            # Its memory may be read-only.
            if self.is_intact and equal(tensor.detach(), values):
                return True
            with torch.inference_mode(tensor.is_inference()):
                tensor.detach().copy_(values)
        except RuntimeError:  # elements share their memory, or torch cannot compare this kind
            return self.is_intact
        return True


class _Containers:
    """Copies containers and notes the tensors in them.

    Args:
        instead: by identity, tensors that are replaced.
    """

    def __init__(self, instead: Mapping[int, Tensor]) -> None:
        self._instead = instead
        self._found: dict[int, Tensor] = {}
        self._made: dict[int, tuple[Any, Any]] = {}
        """By identity a container, which must live as long, and its copy."""

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors found, each once."""
        return list(self._found.values())

    def copied(self, value: Any) -> Any:
        """``value`` in containers of its own; one that cannot be copied stays as it is."""
        if isinstance(value, Tensor):
            self._found[id(value)] = value
            return self._instead.get(id(value), value)
        if not isinstance(value, dict | UserDict | list | tuple):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = value, value  # it may contain itself
            try:
                self._made[id(value)] = value, self._made_again(value)
            except Exception as error:
                # A class of the script may refuse anything, and its step must go on.
                log.debug("a %s in a batch cannot be copied: %s", type(value).__name__, error)
        return self._made[id(value)][1]

    def _made_again(self, value: Any) -> Any:
        if isinstance(value, dict | UserDict):
            held = dict(value.items())
            items = dict(zip(held, self._all(held.values()), strict=True))
            entries = copy.copy(value)
            for key, item in items.items():
                if item is not held[key]:
                    entries[key] = item
            return entries
        if type(value) is list:
            return self._all(value)
        if isinstance(value, list):
            elements = copy.copy(value)
            elements[:] = self._all(value)
            return elements
        parts = self._all(value)
        if all(map(is_, parts, value)):
            return value
        # The constructor of a named tuple may be the script's own.
        return type(value)._make(parts) if hasattr(value, "_make") else type(value)(parts)

    def _all(self, values: Iterable[Any]) -> list[Any]:
        items = list(values)
        # A batch may have a list of numbers for each sample.
        return items if set(map(type, items)) <= SCALARS else list(map(self.copied, items))


def _is_dense(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested


def _copy_of(tensor: Tensor) -> Tensor | None:
    try:
        return tensor.detach().clone()
    except RuntimeError as error:  # the memory of a device may be full
        log.debug("a tensor of a batch cannot be copied: %s", error)
        return None
