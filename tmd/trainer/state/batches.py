"""A batch that may be given out a second time, if its step is repeated.

A script may take entries out of a batch, and change its tensors in place. The repeated step must
get the batch as it was drawn.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Iterator
from typing import Any

from torch import Tensor


class DrawnBatch:
    """A batch as the loader gave it."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._versions = [(tensor, _version(tensor)) for tensor in _tensors(batch)]

    @property
    def is_intact(self) -> bool:
        """Whether its tensors are as they were drawn, as far as torch counts changes in place."""
        return all(_version(tensor) == version for tensor, version in self._versions)

    def given(self) -> Any:
        """The batch for the script: the same tensors, in containers of its own."""
        return _with_own_containers(self._batch)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | UserDict):
        for held in value.values():
            yield from _tensors(held)
    elif isinstance(value, list | tuple):
        for held in value:
            yield from _tensors(held)


def _with_own_containers(value: Any) -> Any:
    if isinstance(value, dict | UserDict):
        own = copy.copy(value)
        for key, held in value.items():
            own[key] = _with_own_containers(held)
        return own
    if type(value) is list:
        return [_with_own_containers(held) for held in value]
    if type(value) is tuple:
        return tuple(_with_own_containers(held) for held in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_with_own_containers, value))
    return value
