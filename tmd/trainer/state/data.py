"""Where a rank stands in its data, and giving the same batch again when a step is repeated.

A position is the number of the ``batches()`` call and of the batch in it. A joiner walks there:
calls before the position end at once, and within the call the batches before are drawn and dropped
(a ``StepSampler`` simply starts there).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from msgspec import Struct
from torch.utils.data import DistributedSampler, Sampler

from tmd.trainer.state.loading import Sown, loads_in_turn, sowing
from tmd.trainer.state.seeds import mixed, seed_all

log = logging.getLogger("tmd.trainer")


class Position(Struct, frozen=True):
    """The next batch of a rank: number ``index`` of the ``call``-th ``batches()``, both from 0."""

    call: int = 0
    index: int = 0


class Course:
    """One iteration of a :class:`StepSampler`."""

    def __init__(self, start: int) -> None:
        self.next = start
        """Batch that it goes on with; may be set."""
        self.given = 0
        """Batches so far."""
        self.ended = False


class StepSampler(Sampler[int]):
    """Indices of a dataset as a function of (seed, step, rank): nothing to save, nothing to skip.

    Draws with replacement; every rank takes its own part of each global batch. Use as the
    ``sampler`` of a ``DataLoader`` with the same ``batch_size``.

    Args:
        size: length of the dataset.
        batch_size: samples per rank and step.
        steps: number of batches.
        place: returns which part of how many is this rank's; asked anew for each batch since a rank
            can be taken over.
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
        """Batch that the next iteration begins with."""
        self.latest: Course | None = None
        """The iteration that was begun last."""
        self.seed_of: Callable[[int], int] | None = None
        """Seed of what loader processes draw for a batch; ``None`` if there are none."""

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
            drawn = torch.randint(self._size, (world, self.batch_size), generator=generator)
            first, *others = drawn[rank].tolist()
            yield first if self.seed_of is None else Sown(first, self.seed_of(step))
            yield from others
        course.ended = True


class Feed:
    """The batches of one ``batches()`` call; those since the last commit are kept for repeating.

    Args:
        loader: any iterable of batches.
        call: number of this ``batches()`` call, from 0.
        base: seeds all that is drawn at random; asked anew for each batch since a rank can be taken
            over.
        place: as that of :class:`StepSampler`.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        call: int,
        base: Callable[[], int],
        place: Callable[[], tuple[int, int]],
    ) -> None:
        self._loader, self.call, self._base, self._place = loader, call, base, place
        self._kept: list[Any] = []
        self._replay = 0
        self._committed = 0
        self._source: Iterator[Any] | None = None
        self._drawn = False
        self._taken = 0
        """Batches that were taken from this source."""
        self._course: Course | None = None
        """By which the processes of the loader go, if they can be told to go elsewhere."""
        self._closed = False

    @property
    def position(self) -> Position:
        """Where the next uncommitted batch stands."""
        return Position(self.call + 1) if self._closed else Position(self.call, self._committed)

    @property
    def closed(self) -> bool:
        """Whether this call is over; nobody knows then if there will be another."""
        return self._closed

    def close(self) -> None:
        """Every rank has come to the end of this call: what is next is the call after it."""
        self._closed = True

    def next(self, step: int) -> Any:
        """The next batch, the first of ``step`` or one more of it.

        Raises:
            StopIteration: the loader has come to its end.
        """
        if self._replay < len(self._kept):
            batch = self._kept[self._replay]
        else:
            batch = self._draw(step)
            self._kept.append(batch)
        self._replay += 1
        return batch

    def commit(self) -> None:
        """All batches given out so far belong to committed steps."""
        self._committed += self._replay
        del self._kept[: self._replay]
        self._replay = 0

    def rewind(self) -> None:
        """Give out the batches since the last commit again."""
        self._replay = 0

    def skip_to(self, index: int) -> None:
        """Go on to batch ``index`` as the rank held now; cheaper than ``seek`` if it is near."""
        done = self._committed + len(self._kept)
        if self._source is None or index < done:
            return self.seek(index)
        for number in range(done, index):
            self._draw(number)
        self._kept.clear()
        self._replay = 0
        self._committed = index

    def seek(self, index: int) -> None:
        """Go to batch ``index`` as the rank held now, forgetting what was drawn before."""
        self._kept.clear()
        self._replay = 0
        self._committed = index
        if not self._jump(index):
            self._open(index)

    def _jump(self, index: int) -> bool:
        """Let the processes of the loader, which are there already, go on with batch ``index``.

        Whether they can. Once others are started, this process has to copy each of its pages at the
        next write to it: those of a state that it has just received, too.
        """
        course = self._course
        if course is None or course.ended:
            return False
        ahead, course.next = course.given - self._taken, index
        try:
            for _ in range(ahead):
                self._draw(index)
        except Exception as error:  # of a batch that nobody wants
            log.warning("the loader is started anew: %s", error)
            return False
        return True

    def _open(self, index: int) -> None:
        # The order of a shuffled epoch must depend on the epoch, not on when a worker got there;
        # some loaders draw it when they are iterated, some with the first batch.
        self._seed(self.call, "epoch")
        sampler = getattr(self._loader, "sampler", None)
        for each in (sampler, getattr(getattr(self._loader, "batch_sampler", None), "sampler", 0)):
            if isinstance(each, DistributedSampler):
                each.rank, parts = self._place()
                _check_parts(each, parts)
        steps = sampler if isinstance(sampler, StepSampler) else None
        skip = index if steps is None else 0
        with sowing(self._loader) as processes:
            if steps is not None:
                # Not a method of this feed: a circle would keep its processes alive after it.
                seed_of = partial(_seed_of, self._base, self.call)
                steps.start, steps.seed_of = index, seed_of if processes else None
                steps.latest = None
            self._source = iter(self._loader)
        self._course = None
        if steps is not None and loads_in_turn(self._loader, steps.batch_size):
            self._course = steps.latest
        # Who starts in the middle has no first batch: the numbers are those of any other one.
        self._drawn, self._taken = skip < index, 0
        for number in range(skip):
            self._draw(number)

    def _seed(self, number: int, purpose: str) -> None:
        seed_all(self._base(), number, purpose)

    def _draw(self, step: int) -> Any:
        if self._source is None:
            self._open(0)
        assert self._source is not None
        self._seed(*((step, "data") if self._drawn else (self.call, "first")))
        self._drawn = True
        batch = next(self._source)
        self._taken += 1
        return batch


def _seed_of(base: Callable[[], int], call: int, index: int) -> int:
    return mixed(base(), index, f"data of call {call}")


def _check_parts(sampler: DistributedSampler[Any], parts: int) -> None:
    if sampler.num_replicas != parts:
        raise ValueError(
            f"the DistributedSampler divides the data among {sampler.num_replicas}, but {parts} "
            "ranks have batches of their own: let num_replicas match, or name the ranks that share "
            'a batch with session.register(data_mesh=mesh["dp"])'
        )
