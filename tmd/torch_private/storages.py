"""The memory of tensors, without keeping it alive."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def place_of(tensor: Tensor) -> Hashable:
    """Where ``tensor`` begins: equal for tensors that begin at one place of the same memory. Memory
    that is allocated later is never the same, even at the same address."""
    storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return storage, tensor.storage_offset()
