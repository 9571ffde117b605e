"""One epoch of a framework's loader, as ``Session.batches`` takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any, NoReturn

from tmd.trainer.state.loading import begin_anew


class Epoch:
    """The same batches as often as it is iterated. ``Session.batches`` places it as any loader.

    Args:
        loader: a loader of torch, or one that is divided like it.
        begin: prepares the loader for this epoch.
        ends: whether training ends before the batch of this number, which counts from ``skip``.
        skip: returns the number of batches to leave out; called when an iteration begins, since the
            state of the rank that is held then decides. ``None`` for none.
        limit: number of the batch at which the epoch ends; ``None`` for that of the loader.
    """

    def __init__(
        self,
        loader: Any,
        begin: Callable[[], object],
        ends: Callable[[int], object],
        skip: Callable[[], int] | None = None,
        limit: int | None = None,
    ) -> None:
        self.base_dataloader, self._begin, self._ends = loader, begin, ends
        self._skip, self._limit = skip, limit

    def __getattr__(self, name: str) -> Any:
        """A session looks for the samplers and generators of the loader."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __iter__(self) -> Iterator[Any]:
        if self._ends(0):
            return  # before the loader starts processes
        self._begin()
        skip = 0 if self._skip is None else self._skip()
        begin_anew(self.base_dataloader)
        batches = islice(self.base_dataloader, skip, self._limit)
        for number in count():
            if self._ends(number):
                return
            try:
                yield next(batches)
            except StopIteration:
                return


def refuse_rest(limit: int) -> NoReturn:
    """Refuse to continue a job that ended within an epoch, at its limit of steps.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"the session checkpoint was saved at the end of a job of {limit} steps, in the middle of "
        "an epoch, or of an epoch of another length. A longer job would miss the rest of that "
        "epoch: remove that checkpoint, so that an earlier one is used, or end jobs with an epoch"
    )
