"""Worker processes of ``torch.utils.data.DataLoader``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch

Indices = list[int] | int
"""The indices of a batch, or one index if the loader makes no batches."""


def before_each_batch(prepare: Callable[[Indices], Indices]) -> None:
    """In a worker process: pass the indices of each batch through ``prepare`` before it loads."""
    kind: Any = fetch._MapDatasetFetcher
    load = kind.fetch

    def prepared(self: object, batch: Indices) -> object:
        return load(self, prepare(batch))

    kind.fetch = prepared


def end_processes(loader: DataLoader[Any]) -> None:
    """End the processes that ``persistent_workers=True`` has kept from an earlier iteration of
    ``loader``: the next one starts others."""
    kept: Any = loader._iterator
    if kept is not None:
        kept._shutdown_workers()
        loader._iterator = None
