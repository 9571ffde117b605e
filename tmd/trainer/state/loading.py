"""Seeds random numbers in loader processes as a function of the batch, and the generators that a
script gives to a loader as a function of the ``batches()`` call or of the evaluation.

A loader process is seeded once, when it starts. A joiner's starts in the middle of an epoch and
would draw other numbers for the same batch. So the first index of each batch carries a seed, which
the process applies before it loads the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import torch
from torch.utils.data import DataLoader

from tmd.torch_private.loaders import before_each_batch, forget_processes
from tmd.trainer.state.placing import pieces
from tmd.trainer.state.seeds import mixed, seed_generators

_seeds: dict[torch.Generator, tuple[int, int]] = {}
"""For a generator of the script: the seed from the script, and the one set here since.

The generators stay in memory, 5 kB each: torch 2.11 cannot refer to one weakly.
"""


class SeededIndex(int):
    """Index of a dataset that carries the ``seed`` of the batch it begins."""

    seed: int

    def __new__(cls, index: int, seed: int = 0) -> SeededIndex:
        made = super().__new__(cls, index)
        made.seed = seed
        return made


def has_processes(loader: object) -> TypeGuard[DataLoader[Any]]:
    return isinstance(loader, DataLoader) and loader.num_workers > 0


def epoch_of(loader: Any) -> int | None:
    """The epoch of a loader that counts its iterations, as Accelerate's do, and shuffles by it."""
    epoch = getattr(loader, "iteration", None)
    return epoch if isinstance(epoch, int) and hasattr(loader, "set_epoch") else None


def seed_own_generators(loader: object, number: int) -> None:
    """Seed the generators of ``loader`` and of its samplers as in any iteration for ``number``,
    that of a ``batches()`` call or of the step of an evaluation.

    An iteration draws its order from them, and the next one would have another order: after an
    earlier iteration, or none, a joiner would meet other batches than its rank. Number 0 has the
    order of the seed that the script has chosen.
    """
    for generator, chosen in _own_generators(loader).items():
        held = generator.initial_seed()
        own, ours = _seeds.get(generator, (held, held))
        if chosen is not None:
            own = chosen
        elif held != ours:
            own = held  # the script has seeded again
        seed = (own if number == 0 else mixed(own, number, "order")) & (2**63 - 1)
        _seeds[generator] = own, seed
        generator.manual_seed(seed)


def _own_generators(loader: object) -> dict[torch.Generator, int | None]:
    """The generators of ``loader`` and of its samplers, each with the seed that a sampler keeps for
    it: Accelerate's seeds its generator by that and the epoch whenever it is iterated."""
    found: dict[torch.Generator, int | None] = {}
    for each in pieces(loader):
        if isinstance(generator := getattr(each, "generator", None), torch.Generator):
            kept = getattr(each, "initial_seed", None)
            found[generator] = kept if isinstance(kept, int) else found.get(generator)
    return found


@contextmanager
def seeded_workers(loader: object) -> Iterator[bool]:
    """Processes that ``loader`` starts in this context apply the seeds that indices carry. Yields
    whether it starts any."""
    if not has_processes(loader):
        yield False
        return
    own = loader.worker_init_fn
    loader.worker_init_fn = partial(_start, own)
    try:
        yield True
    finally:
        loader.worker_init_fn = own


def begin_anew(loader: object) -> None:
    """Let the processes of ``loader`` begin with this iteration, also if it keeps them: what they
    have drawn before is in their random state, and a joiner's have not drawn it."""
    if has_processes(loader) and loader.persistent_workers:
        forget_processes(loader)


def loads_in_turn(loader: object, batch_size: int) -> bool:
    """Whether processes load batches of this size and return them in the order of the sampler."""
    return has_processes(loader) and loader.batch_size == batch_size and loader.in_order


def _start(own: Callable[[int], None] | None, number: int) -> None:
    """Runs first in the worker process."""
    before_each_batch(_apply_seed)
    if own is not None:
        own(number)


def _apply_seed(batch: list[int] | int) -> list[int] | int:
    """The plain indices of ``batch``, which is a single index if the loader makes no batches."""
    first = batch[0] if isinstance(batch, list) else batch
    if not isinstance(first, SeededIndex):
        return batch
    seed_generators(first.seed)
    return [int(first), *batch[1:]] if isinstance(batch, list) else int(first)
