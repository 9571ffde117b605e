"""A sampler whose indices follow from the step alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from tmd.trainer.state.loading import SeededIndex


class Course:
    """One iteration of a :class:`StepSampler`."""

    def __init__(self, start: int) -> None:
        self.next = start
        """Number of its next batch; may be set."""
        self.given = 0
        """Number of batches given so far."""
        self.ended = False


class StepSampler(Sampler[int]):
    """Indices of a dataset as a function of (seed, step, rank): no state to save, none to skip.

    Draws with replacement; every rank takes its own part of each global batch. Use as the
    ``sampler`` of a ``DataLoader`` with the same ``batch_size``.

    Args:
        size: length of the dataset.
        batch_size: samples per rank and step.
        steps: number of batches.
        place: returns the index of this rank's part and the number of parts; called again for each
            batch, since the worker's rank can change.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        steps: int,
        place: Callable[[], tuple[int, int]],
        seed: int = 0,
    ) -> None:
        self._size, self.batch_size, self._steps = size, batch_size, steps
        self._place, self._seed = place, seed
        self.start = 0
        """First batch of the next iteration."""
        self.latest: Course | None = None
        """The iteration that began last."""
        self.seed_of: Callable[[int], int] | None = None
        """Returns the seed for a batch's loader processes; ``None`` if there are none."""

    def __len__(self) -> int:
        return self._steps * self.batch_size

    def __iter__(self) -> Iterator[int]:
        self.latest = Course(self.start)
        return self._indices(self.latest)

    def _indices(self, course: Course) -> Iterator[int]:
        generator = torch.Generator()
        while course.next < self._steps:
            step, course.next, course.given = course.next, course.next + 1, course.given + 1
            rank, world = self._place()
            generator.manual_seed(self._seed * 1_000_003 + step)
            size = (world, self.batch_size)
            drawn = torch.randint(self._size, size, generator=generator, device="cpu")
            first, *others = drawn[rank].tolist()
            yield first if self.seed_of is None else SeededIndex(first, self.seed_of(step))
            yield from others
        course.ended = True


def check_size(loader: Any, size: int) -> None:
    """Raises ValueError: batches of another size would begin at other samples after a seek."""
    own = getattr(loader, "batch_size", size)  # a wrapper may have none
    if (1 if own is None else own) != size:
        raise ValueError(
            f"session.sampler(batch_size={size}) is in a DataLoader with batch_size={own}: give "
            "both the same"
        )
