"""The data position of a rank, and the same batch again when a step is repeated.

A position is the number of the ``batches()`` call and of the batch in it, and which repeatable
function is due before that batch. To reach it, a joiner ends earlier calls at once, and within the
call draws and drops the earlier batches (a ``StepSampler`` starts at the position).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from msgspec import Struct, structs

from tmd.core.values.errors import StateMismatch
from tmd.trainer.state.batches import DrawnBatch
from tmd.trainer.state.loading import (
    begin_anew,
    epoch_of,
    loads_in_turn,
    seed_own_generators,
    seeded_workers,
)
from tmd.trainer.state.placing import (
    DRAWN,
    DataPlace,
    Loader,
    batch_count,
    divided_batch_size,
    is_function,
    placed,
    refuse_fixed,
)
from tmd.trainer.state.read_ahead import without_read_ahead
from tmd.trainer.state.seeds import mixed, seed_all
from tmd.trainer.state.step_sampler import Course, StepSampler, check_size

log = logging.getLogger("tmd.trainer")

UNKNOWN_PARTS = (
    ", so samples come again or are left out if each rank has its own part of them: change the "
    "number of ranks between two epochs"
)


class Position(Struct, frozen=True):
    """The next batch of a rank: number ``index`` of the ``call``-th ``batches()``, both from 0."""

    call: int = 0
    index: int = 0
    due: str = ""
    """Name of the repeatable function that runs before this batch; empty for none."""
    over: bool = False
    """The call has ended on all ranks, and only ``due`` is left of it."""
    exhausted: bool = False
    """The loader has no more batches for a step. With uneven loaders a rank may have had fewer than
    ``index``."""
    parts: int = 0
    """Number of parts of the data; only in a checkpoint, and 0 in one of tmd 0.1.0."""
    batch: int = 0
    """Samples in a batch of one rank; 0 if the loader does not tell. Only in a checkpoint."""


class Feed:
    """The batches of one ``batches()`` call; uncommitted ones are kept for a repeat.

    Args:
        loader: any iterable of batches, or a function that builds one for a part of the data.
        call: number of this ``batches()`` call, from 0.
        base: returns the seed of all random draws; called again for each batch, since the worker's
            rank can change.
        place: as for :class:`StepSampler`.
    """

    def __init__(
        self,
        loader: Loader,
        call: int,
        base: Callable[[], int],
        place: Callable[[], DataPlace],
    ) -> None:
        self._loader, self.call, self._base, self._place = loader, call, base, place
        self._epoch = epoch_of(loader)
        self._kept: list[DrawnBatch] = []
        self._changes: bool | None = None
        """Whether the script changes tensors of its batches; ``None`` before its first step."""
        self._draws_once = False
        """Whether a batch that was changed cannot be drawn again from the loader."""
        self._replay = 0
        self._committed = 0
        self._source: Iterator[Any] | None = None
        self._drawn = False
        self._taken = 0
        """Number of batches taken from the current source."""
        self._course: Course | None = None
        """The iteration that loader processes follow, if they can jump to another batch."""
        self._closed = False
        self._exhausted = False
        """Whether the loader has no more batches for a step."""
        self.due = ""
        """Name of the repeatable function that all ranks run now; empty for none."""
        self.left = False
        """Whether this worker left the call before its end, since its rank is past it."""
        self.ended = False
        """Whether this worker was in the call at its end."""
        self.broken_off = False
        """Whether the script left the loop between a batch and its step."""
        self._opened_at: DataPlace | None = None
        """The place for which the loader was opened."""
        self._beside: dict[int, Feed] = {}
        """The feeds of ranks that this worker has adopted."""

    @property
    def position(self) -> Position:
        """Position of the next uncommitted batch."""
        if self._closed and not self.due:
            return Position(self.call + 1)
        return Position(self.call, self._committed, self.due, self._closed, self._exhausted)

    @property
    def checkpoint_position(self) -> Position:
        """The position as a checkpoint holds it, for :meth:`resume` by a job of any size."""
        return structs.replace(
            self.position, parts=self._place().parts, batch=divided_batch_size(self._loader)
        )

    @property
    def drawn(self) -> bool:
        """Whether batches were given out that belong to no committed step."""
        return self._replay > 0

    @property
    def closed(self) -> bool:
        """Whether all ranks have ended this call."""
        return self._closed

    @property
    def over(self) -> bool:
        """Whether this worker has left the call, as far as known."""
        return self._closed or self.left or self.broken_off

    def close(self) -> None:
        """End this call on all ranks: the next position is in the call after it."""
        self._closed, self._exhausted = True, False
        # Batches may be left over that were too few for a step.
        self._kept.clear()
        self._replay = 0
        self.count_iteration()

    def leave(self) -> None:
        """This worker leaves the call before its end."""
        self.left = True
        self.count_iteration()

    def count_iteration(self) -> None:
        """Let the next iteration of the loader be that of the next epoch."""
        if self._epoch is not None:
            self._loader.set_epoch(self._epoch + 1)  # type: ignore[union-attr]

    def next(self, step: int) -> Any:
        """The next batch of ``step``.

        Raises:
            StopIteration: the loader is exhausted.
        """
        if self._replay < len(self._kept) and self._kept[self._replay].is_lost:
            self._draw_again(step)
        if self._replay == len(self._kept):
            self._kept.append(self._drawn_batch(step, len(self._kept)))
        self._replay += 1
        return self._kept[self._replay - 1].given()

    def _draw_again(self, step: int) -> None:
        """The script has changed a batch that belongs to no committed step: draw all of these."""
        given, self._changes = self._replay, True
        if self._draws_once:
            log.warning("a repeated step gets a batch that the script has changed in place")
            return
        self.seek(self.position)
        self._kept = [self._drawn_batch(step, number) for number in range(given)]
        self._replay = given

    def _drawn_batch(self, step: int, number: int) -> DrawnBatch:
        """``number``: that of the batch within its step."""
        batch = self._draw(step, number)
        # A copy of a large batch costs time in each step, and most scripts leave theirs as it is.
        return DrawnBatch(batch, copied=self._draws_once or self._changes is not False)

    def several(self, step: int, count: int, *, partial: bool) -> list[Any]:
        """The next ``count`` batches for ``step``; fewer at the end, if ``partial``.

        Raises:
            StopIteration: there are none.
        """
        drawn: list[Any] = []
        while len(drawn) < count:
            try:
                batch = self.next(step)
            except StopIteration:
                if partial and drawn:
                    break
                self._exhausted = True
                raise
            drawn.append(batch)
        return drawn

    def beside(self, rank: int) -> Feed:
        """The feed of an adopted ``rank``, at the same position. The worker must show that rank."""
        feed = self._beside.get(rank)
        if feed is None or feed.position != self.position:
            feed = self._beside[rank] = Feed(self._loader, self.call, self._base, self._place)
            feed.seek(self.position)
        return feed

    def drop_beside(self) -> None:
        """No rank is adopted any more."""
        self._beside.clear()

    def commit(self) -> None:
        """Note that all batches given out so far belong to committed steps."""
        for feed in self._beside.values():
            feed.commit()
        if self._replay:
            intact = all(batch.is_intact for batch in self._kept[: self._replay])
            self._changes = bool(self._changes) or not intact
        self._committed += self._replay
        del self._kept[: self._replay]
        self._replay = 0

    def rewind(self) -> None:
        """Give out the batches since the last commit again."""
        for feed in self._beside.values():
            feed.rewind()
        self._replay = 0

    def skip_to(self, position: Position) -> None:
        """Go to ``position`` as the rank held now; cheaper than ``seek`` for a near batch."""
        done, index = self._committed + len(self._kept), position.index
        if self._source is None or index < done or position.over:
            return self.seek(position)
        self._drop(range(done, index), exhausted=position.exhausted)
        self._go_to(position)

    def seek(self, position: Position) -> None:
        """Go to ``position`` as the rank held now, and forget the batches drawn before."""
        self._go_to(position)
        if not position.over and not self._jump(position.index):
            self._open(position.index, exhausted=position.exhausted)

    def resume(self, position: Position) -> None:
        """Go to the ``position`` of a checkpoint, whose job may have divided the data otherwise. An
        epoch of which each rank is known to have a part then goes on after as many samples, rounded
        down to a batch of each rank. Others go on at the same batch.

        Raises:
            StateMismatch: the loader gives fewer batches.
        """
        (part, parts), batch = self._place(), divided_batch_size(self._loader)
        known, later = bool(batch and position.batch), position
        is_same = position.parts in (0, parts) and not (known and position.batch != batch)
        if is_same or not position.index or position.over:
            return self.seek(position)
        if known:
            # At the end of an epoch the last batches of the former job may have been smaller.
            count = batch_count(self._loader, position.parts, position.batch)
            ends = position.exhausted or position.index >= count
            done = position.index * position.parts * position.batch // (parts * batch)
            index = batch_count(self._loader, parts, batch) if ends else done
            later = structs.replace(position, index=index, exhausted=ends)
        self.seek(later)
        counts_steps = isinstance(getattr(self._loader, "sampler", None), StepSampler)
        if part == 0 and not counts_steps:
            log.warning(
                "the data are divided into %d parts%s, and were into %d%s: the loop goes on at "
                "batch %d of each rank%s",
                *(parts, f" of {batch} samples a batch" if known else "", position.parts),
                *(f" of {position.batch}" if known else "", later.index),
                ", after as many samples" if known else UNKNOWN_PARTS,
            )

    def _go_to(self, position: Position) -> None:
        self._kept.clear()
        self._replay = 0
        self._committed = position.index
        self.due, self._closed, self._exhausted = position.due, position.over, False

    def _jump(self, index: int) -> bool:
        """Let the running loader processes continue with batch ``index``; returns whether they can.

        To fork new ones would make this process copy each of its pages at the next write to it,
        even those of a state that it has just received.
        """
        course = self._course
        if course is None or course.ended:
            return False
        if is_function(self._loader) and self._opened_at != self._place():
            return False
        ahead, course.next = course.given - self._taken, index
        try:
            for _ in range(ahead):
                self._draw(index)
        except Exception as error:  # in a batch that is dropped
            log.warning("starting the data loader again: %s", error)
            return False
        return True

    def _open(self, index: int, *, exhausted: bool = False) -> None:
        # The order of a shuffled epoch must depend on the epoch, not on the moment a worker begins.
        # Some loaders draw the order when they are iterated, some with the first batch.
        self._seed(self.call, "epoch")
        self._opened_at = self._place()
        loader = placed(self._loader, self._opened_at)
        if self._epoch is not None:
            self._loader.set_epoch(self._epoch)  # type: ignore[union-attr]
        seed_own_generators(loader, self.call)
        sampler = getattr(loader, "sampler", None)
        steps = sampler if isinstance(sampler, StepSampler) else None
        if steps is not None:
            check_size(loader, steps.batch_size)
        skip = index if steps is None else 0
        if steps is None:
            self._source = None
            begin_anew(loader)
        with seeded_workers(loader) as processes:
            if steps is not None:
                # Not a method of this feed: a reference cycle would keep its processes alive.
                seed_of = partial(_seed_of, self._base, self.call)
                steps.start, steps.seed_of = index, seed_of if processes else None
                steps.latest = None
            self._source = iter(without_read_ahead(loader, self._opened_at.parts))
        # A generator only goes on, and a list returns the very batch that was changed.
        goes_on = self._source is loader and not is_function(self._loader)
        self._draws_once = goes_on or isinstance(loader, list | tuple)
        self._course = None
        if steps is not None and loads_in_turn(loader, steps.batch_size):
            self._course = steps.latest
        # A worker that starts in the middle seeds its first batch as any other one.
        self._drawn, self._taken = skip < index, 0
        self._drop(range(skip), exhausted=exhausted)

    def _drop(self, numbers: range, *, exhausted: bool = False) -> None:
        """Draw the batches ``numbers`` for nothing.

        Raises:
            StateMismatch: there are fewer, and these are not the last ones.
        """
        for number in numbers:
            try:
                self._draw(number)
            except StopIteration:
                if exhausted:
                    return
                raise StateMismatch(
                    f"this rank is at batch {numbers.stop} of call {self.call} of "
                    f"session.batches(), but its loader gives only {number}: use the data, the "
                    "batch size and the number of ranks with which the job began"
                ) from None

    def _seed(self, number: int, purpose: str) -> None:
        seed_all(self._base(), number, purpose)

    def _draw(self, step: int, number: int = 0) -> Any:
        if self._source is None:
            self._open(0)
        assert self._source is not None
        purpose = f"data {number}" if number else "data"
        first, self._drawn = not self._drawn, True
        self._seed(*((self.call, "first") if first else (step, purpose)))
        batch = next(self._source)
        if first:
            assert self._opened_at is not None
            # A stream may read the rank with its first batch, and not again.
            refuse_fixed(self._loader, self._opened_at, DRAWN)
        self._taken += 1
        return batch


def _seed_of(base: Callable[[], int], call: int, index: int) -> int:
    return mixed(base(), index, f"data of call {call}")
