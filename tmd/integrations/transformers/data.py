"""The batches of an epoch, for whichever rank reads them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import IterableDataset
from transformers.trainer_utils import has_length, seed_worker

from tmd.integrations.transformers.arguments import session
from tmd.integrations.transformers.progress import Progress


class Batches:
    """The batches of one epoch, from the first one on, as often as they are iterated.

    ``stopped``: see :attr:`Progress.stopped`, which may change while they are iterated.
    """

    def __init__(self, loader: Any, epoch: int, skip: int, progress: Progress) -> None:
        self._loader, self._epoch, self._skip, self._progress = loader, epoch, skip, progress
        # Where a session looks for shards, which it divides anew.
        self.dataset, self.sampler = loader.dataset, loader.sampler
        self.batch_sampler = loader.batch_sampler

    def __iter__(self) -> Iterator[Any]:
        inner: Any = getattr(self.batch_sampler, "batch_sampler", None)
        for each in (self._loader, inner):
            if hasattr(each, "set_epoch"):
                each.set_epoch(self._epoch)
        # Accelerate's own iterator synchronises generators and reads one batch ahead.
        loader = getattr(self._loader, "base_dataloader", self._loader)
        start = loader.worker_init_fn
        if isinstance(start, partial) and start.func is seed_worker:
            count = loader.num_workers
            loader.worker_init_fn = partial(seed_worker, num_workers=count, rank=session().rank)
        batches = islice(loader, self._skip, None)
        number = 0
        while self._progress.stopped != [self._epoch, number]:
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
            number += 1


def refuse_data(loader: Any, args: Any) -> None:
    """Raises ValueError: the data of ``loader`` cannot move with a rank."""
    data = loader.dataset
    sharded = isinstance(data, IterableDatasetShard)
    if isinstance(data, IterableDataset) and not sharded and args.world_size > 1:
        raise ValueError(
            f"{type(data).__name__} was divided for one rank when the loader was built, but a "
            "worker's rank can change: wrap it in an IterableDataset of torch"
        )
    epochs = "epoch" in (args.eval_strategy, args.save_strategy, args.logging_strategy)
    if epochs and not has_length(loader):
        raise ValueError("an epoch of unknown length: log, evaluate and save by 'steps'")
