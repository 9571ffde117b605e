"""The data of a trainer, for whichever rank reads them."""

from __future__ import annotations

from typing import Any

from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import IterableDataset
from transformers.trainer_utils import has_length


def set_epoch(loader: Any, epoch: int) -> None:
    """Let a loader of Accelerate begin ``epoch``, whose order follows from its number."""
    inner: Any = getattr(loader.batch_sampler, "batch_sampler", None)
    for each in (loader, inner):
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)


def refuse_data(loader: Any, args: Any) -> None:
    """Raises ValueError: the data of ``loader`` cannot move with a rank."""
    data = loader.dataset
    sharded = isinstance(data, IterableDatasetShard)
    if isinstance(data, IterableDataset) and not sharded and args.world_size > 1:
        raise ValueError(
            f"{type(data).__name__} was divided for one rank when the loader was built, but a "
            "worker's rank can change: wrap it in an IterableDataset of torch"
        )
    _refuse_collator(getattr(loader.collate_fn, "data_collator", loader.collate_fn), args)
    epochs = "epoch" in (args.eval_strategy, args.save_strategy, args.logging_strategy)
    if epochs and not has_length(loader):
        raise ValueError("an epoch of unknown length: log, evaluate and save by 'steps'")


def _refuse_collator(collator: Any, args: Any) -> None:
    """A collator with a seed draws from one generator as long as its process lives, and a worker
    that takes a rank has not drawn what the rank drew in earlier epochs. One in a process of the
    loader begins anew with each epoch."""
    seed = getattr(collator, "seed", None)
    if seed is None or not hasattr(collator, "generator") or args.dataloader_num_workers:
        return
    raise ValueError(
        f"{type(collator).__name__}(seed={seed}): leave it out, since tmd seeds each batch, or "
        "set dataloader_num_workers"
    )
