"""Gives a loader the part of the data that belongs to the rank held now."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, TypeGuard, cast

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from tmd.torch_private.loaders import is_iteration


class DataPlace(NamedTuple):
    """Which part of the data is a rank's."""

    part: int
    """Number of the part, from 0. Ranks that share each batch have the same one."""
    parts: int
    """Number of different parts."""


NUMBERS = ("world_size", "num_replicas", "num_ranks")
"""Names by which a sampler or a stream keeps the number of ranks."""
DEPTH = 3
"""Samplers around samplers that are looked at."""
Loader = Iterable[Any] | Callable[[DataPlace], Iterable[Any]]
"""Batches, or a function that builds the loader for a part of the data."""


def placed(loader: Loader, place: DataPlace) -> Iterable[Any]:
    """The loader for ``place``: built by the given function, or the given one, divided anew.

    Samplers of torch and shards of Accelerate are divided anew, and a ``worker_init_fn`` that was
    given a rank gets another one. A function is called with ``place``.

    Raises:
        ValueError: the loader divides the data among another number of ranks, or was divided for
            one rank in a way that cannot be changed, or begins elsewhere when iterated again.
    """
    if is_function(loader):
        return loader(place)
    if getattr(loader, "next_iter_state", None) is not None:
        raise ValueError(
            f"{type(loader).__name__} was given a state by load_state_dict, from which only its "
            "next iteration begins, but a joiner or a roll-back iterates it again: resume by "
            "session.checkpoint(), or pass a function that builds the loader and loads the state: "
            "session.batches(lambda place: make_loader(place.part, place.parts, state))"
        )
    _seed_by_part(getattr(loader, "base_dataloader", loader), place.part)
    for each in pieces(loader):
        if isinstance(each, DistributedSampler):
            _check(each, each.num_replicas, place)
            each.rank = place.part
        elif _is_shard(each):
            _check(each, each.num_processes, place)
            each.process_index = place.part
        elif place.parts > 1 and getattr(each, "rng_types", None):
            raise ValueError(
                f"{type(each).__name__} broadcasts the state of a random generator each time it is "
                "iterated, but a joiner begins alone: use "
                "DataLoaderConfiguration(use_seedable_sampler=True)"
            )
    refuse_fixed(loader, place, OPENED)
    return cast("Iterable[Any]", loader)


class KnownPieces:
    """Parts of loaders that were found to keep no rank. They are not looked at again: a refusal
    later, in the second epoch say, would end a job that has trained."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[object]] = {}

    def has(self, piece: object) -> bool:
        known = self._known.get(id(piece))
        return known is not None and known() is piece

    def add(self, piece: object) -> None:
        with contextlib.suppress(TypeError):  # not each object can be referred to
            self._known[id(piece)] = weakref.ref(piece, partial(self._forget, id(piece)))

    def _forget(self, number: int, gone: object) -> None:
        if self._known.get(number) is gone:
            del self._known[number]


OPENED, DRAWN = KnownPieces(), KnownPieces()
"""Parts of loaders that were opened, and those from which a step has drawn a batch."""


def refuse_fixed(loader: Loader, place: DataPlace, known: KnownPieces) -> None:
    """Check that no part of ``loader`` keeps a rank, except those that are ``known``.

    Raises:
        ValueError: the data are fixed for one rank.
    """
    if place.parts == 1 or is_function(loader):
        return
    new = [each for each in pieces(loader) if not known.has(each)]
    for each in new:
        if isinstance(each, DistributedSampler) or _is_shard(each):
            continue
        if (rank := fixed_rank(each, place.parts)) is not None:
            raise ValueError(
                f"the data of {type(each).__name__} are fixed for rank {rank}, but a worker's rank "
                "can change: pass a function that builds the loader, as in "
                "session.batches(lambda place: make_loader(place.part, place.parts)), or read the "
                "rank in __iter__, and keep it in a local variable"
            )
    for each in new:
        known.add(each)


def undivided(loader: Loader) -> str:
    """Why one worker cannot draw the batches of several ranks from ``loader`` at the same time, as
    far as known; empty if it can."""
    if is_function(loader) or isinstance(loader, list | tuple | range):
        return ""
    if type(loader) is not DataLoader:
        return f"its batches come from a {type(loader).__name__}"
    if loader.persistent_workers:
        return "its DataLoader has persistent_workers"
    if isinstance(loader.dataset, IterableDataset):
        return "its data set is an IterableDataset"
    if any(getattr(piece, "generator", None) is not None for piece in pieces(loader)):
        return "its DataLoader, or a sampler of that, has a generator of its own"
    return ""


def refuse_one_shot(loader: Loader) -> None:
    """Raises ValueError: ``loader`` gives its batches only once."""
    kind = type(loader)
    passes = isinstance(loader, Iterator) and kind.__module__ in ("builtins", "itertools")
    if (passes and kind is not repeat) or is_iteration(loader):
        raise ValueError(
            f"session.batches(): a {kind.__name__} gives its batches only once, but a worker that "
            "takes a rank, and one that goes back, start from the beginning: pass the list or "
            "loader itself, or a function that makes the iterator, as in "
            "session.batches(lambda place: zip(one, other))"
        )


def is_function(loader: Loader) -> TypeGuard[Callable[[DataPlace], Iterable[Any]]]:
    """Whether ``loader`` is a function that builds a loader."""
    return callable(loader) and not any(hasattr(loader, n) for n in ("__iter__", "__getitem__"))


def divided_batch_size(loader: Loader) -> int:
    """Samples in a batch of one rank, if ``loader`` is known to give each rank its part of an
    epoch, in an order that does not depend on the number of ranks; else 0."""
    sampler = getattr(loader, "sampler", None)
    if type(loader) is DataLoader and type(sampler) is DistributedSampler:
        return loader.batch_size or 0
    return 0


def batch_count(loader: Any, parts: int, batch: int) -> int:
    """Number of batches that a rank gets in an epoch of ``loader``, if this is divided into
    ``parts`` with ``batch`` samples a batch. The loader is one that :func:`divided_batch_size`
    knows."""
    length, cuts = len(loader.sampler.dataset), loader.sampler.drop_last
    samples = length // parts if cuts else -(-length // parts)
    return samples // batch if loader.drop_last else -(-samples // batch)


def pieces(loader: object) -> Iterator[Any]:
    """The loader, its data set and its samplers; ``None`` for what it lacks."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    yield loader
    yield getattr(loader, "dataset", None)
    sampler = getattr(loader, "sampler", None)
    for _ in range(DEPTH):
        yield sampler
        sampler = getattr(sampler, "sampler", None)
    while batch_sampler is not None:
        yield batch_sampler
        yield getattr(batch_sampler, "sampler", None)
        batch_sampler = getattr(batch_sampler, "batch_sampler", None)


def _seed_by_part(loader: object, part: int) -> None:
    """Lightning and transformers seed loader processes by the rank at the time of building."""
    if not isinstance(loader, DataLoader):
        return
    init = loader.worker_init_fn
    if isinstance(init, partial) and isinstance(init.keywords.get("rank"), int):
        loader.worker_init_fn = partial(init, rank=part)


def _is_shard(value: object) -> bool:
    """Whether it is divided as Accelerate's ``BatchSamplerShard`` and ``IterableDatasetShard``."""
    return all(isinstance(getattr(value, n, None), int) for n in ("process_index", "num_processes"))


def fixed_rank(value: object, parts: int) -> int | None:
    """The rank that was fixed when ``value`` was built, if any: of torchtitan's loaders, Megatron's
    samplers, streams that ``datasets.distributed`` has divided, and samplers and streams of the
    script's own that keep a rank and the number of ranks."""
    kept: dict[str, object] = vars(value) if isinstance(value, Sampler | IterableDataset) else {}
    # With a number of 1 all ranks read all.
    sizes = {parts, dist.get_world_size() if dist.is_initialized() else parts} - {1}
    found = (
        getattr(value, "dp_rank", None),
        getattr(value, "data_parallel_rank", None),
        getattr(getattr(value, "_distributed", None), "rank", None),
        kept.get("rank") if any(_one_of(sizes, kept.get(name)) for name in NUMBERS) else None,
        kept.get("rank") if _one_of(sizes, kept.get("num_shards")) else None,  # or it is of files
    )
    return next((rank for rank in found if isinstance(rank, int)), None)


def _one_of(sizes: set[int], number: object) -> bool:
    return isinstance(number, int) and number in sizes


def _check(divided: object, parts: int, place: DataPlace) -> None:
    if parts != place.parts:
        raise ValueError(
            f"the {type(divided).__name__} divides the data into {parts} parts, but {place.parts} "
            f"ranks have different batches: divide it into {place.parts}, or name the ranks that "
            'share a batch with session.register(data_mesh=mesh["dp"])'
        )
