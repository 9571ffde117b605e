"""Iterates a loader of Accelerate without reading one batch ahead.

Accelerate's own iterator draws batch n + 1 before it gives batch n, to know which one is the last.
A data set or a collator that draws random numbers in this process then does so under the seed of
another step. Which step that is depends on how the position was reached, so a joiner gets another
batch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

log = logging.getLogger("tmd.trainer")


def without_read_ahead(loader: Iterable[Any], parts: int) -> Iterable[Any]:
    """``loader``, or the batches of an Accelerate loader, each drawn when it is asked for.

    The loader shows the script the same as in an iteration of its own, if batches are drawn one at
    a time. Only ``end_of_dataloader`` stays false at the last batch of data without a length.

    Args:
        parts: number of parts of the data.

    Raises:
        ValueError: rank 0 reads the batches of this loader for all ranks.
    """
    module = sys.modules.get("accelerate.data_loader")
    if module is None:
        return loader
    kind = type(loader)  # its __class__ is that of a DataLoader
    if issubclass(kind, module.DataLoaderDispatcher):
        if parts == 1:
            return loader
        raise ValueError(
            "rank 0 reads the batches of this loader for all ranks, so a loss of it loses data: "
            "use DataLoaderConfiguration(dispatch_batches=False)"
        )
    if not issubclass(kind, module.DataLoaderShard):
        return loader
    if kind.__iter__ is not module.DataLoaderShard.__iter__:
        log.warning(
            "%s has an iterator of its own. If it reads ahead and the data draw random numbers in "
            "this process, a joiner gets other batches: give session.batches() the loader that it "
            "wraps, base_dataloader",
            kind.__name__,
        )
        return loader
    return _batches(loader, module)


def _batches(shard: Any, module: Any) -> Iterator[Any]:
    """As ``DataLoaderShard.__iter__``, which also leaves out ``end()`` if it is not exhausted."""
    if shard.rng_types is not None:
        module.synchronize_rng_states(shard.rng_types, shard.synchronized_generator)
    shard.begin()
    shard.set_epoch(shard.iteration)
    length = None
    with suppress(TypeError):  # an iterable data set without a length
        length = len(shard.base_dataloader)
    for number, batch in enumerate(shard.base_dataloader, 1):
        if shard.device is not None:
            batch = module.send_to_device(batch, shard.device, non_blocking=shard._non_blocking)
        shard.end_of_dataloader = number == length
        shard._update_state_dict()
        if number > shard.skip_batches:
            yield batch
    shard.iteration += 1
    shard.end()
