"""Random numbers in loader processes, as a function of the batch.

Such a process is seeded once, when it starts. One that starts in the midst of an epoch, as that of
a joiner does, would draw other numbers for the same batch. So the first index of each batch brings
a seed along, which the process takes before it loads the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

from torch.utils.data import DataLoader

from tmd.torch_private.loaders import before_each_batch
from tmd.trainer.state.seeds import sow


class Sown(int):
    """Index of a dataset, with the ``seed`` of the batch that begins with it."""

    seed: int

    def __new__(cls, index: int, seed: int = 0) -> Sown:
        made = super().__new__(cls, index)
        made.seed = seed
        return made


def has_processes(loader: object) -> TypeGuard[DataLoader[Any]]:
    return isinstance(loader, DataLoader) and loader.num_workers > 0


@contextmanager
def sowing(loader: object) -> Iterator[bool]:
    """Within: processes that ``loader`` starts take the seeds that indices bring along. Whether it
    starts any."""
    if not has_processes(loader):
        yield False
        return
    own = loader.worker_init_fn
    loader.worker_init_fn = partial(_start, own)
    try:
        yield True
    finally:
        loader.worker_init_fn = own


def loads_in_turn(loader: object, batch_size: int) -> bool:
    """Whether processes load such batches, and give them in the order of the sampler."""
    return has_processes(loader) and loader.batch_size == batch_size and loader.in_order


def _start(own: Callable[[int], None] | None, number: int) -> None:
    """In the worker process."""
    before_each_batch(_sown)
    if own is not None:
        own(number)


def _sown(batch: list[int] | int) -> list[int] | int:
    """The plain indices of ``batch``, of which there is one if the loader makes no batches."""
    first = batch[0] if isinstance(batch, list) else batch
    if not isinstance(first, Sown):
        return batch
    sow(first.seed)
    return [int(first), *batch[1:]] if isinstance(batch, list) else int(first)
