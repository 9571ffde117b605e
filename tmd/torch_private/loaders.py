"""Worker processes of ``torch.utils.data.DataLoader``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _BaseDataLoaderIter

Indices = list[int] | int
"""The indices of a batch, or one index if the loader makes no batches."""


def before_each_batch(prepare: Callable[[Indices], Indices]) -> None:
    """In a worker process: pass the indices of each batch through ``prepare`` before it loads."""
    kind: Any = fetch._MapDatasetFetcher
    load = kind.fetch

    def prepared(self: object, batch: Indices) -> object:
        return load(self, prepare(batch))

    kind.fetch = prepared


def is_iteration(value: object) -> bool:
    """Whether ``value`` is one iteration of a loader, as ``iter(loader)`` returns it."""
    return isinstance(value, _BaseDataLoaderIter)


def forget_processes(loader: DataLoader[Any]) -> None:
    """Let the next iteration of ``loader`` start processes, although ``persistent_workers=True``
    has kept those of an earlier one. These end with the last reference to their iterator, which a
    derived class may hold and go on using. A loader of Accelerate has one of torch inside."""
    inner: Any = loader
    while (within := vars(inner).get("base_dataloader")) is not None:
        inner = within
    inner._iterator = None
