"""Recognises steps in which a reduction may depend on the result of an earlier one.

Only the last pass of a step has results (:mod:`tmd.fabric.passes`). An earlier pass goes on with
its own input in their place. If it uses that for what it gives to a later reduction, the sum is
wrong on all ranks alike, and nothing else would show it: a loss that is divided by the number of
tokens of all ranks, for example.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import TypeVar

from torch import Tensor
from torch.futures import Future

from tmd.fabric.callbacks import in_callback
from tmd.torch_private.storages import place_of

S = TypeVar("S")
T = TypeVar("T")

WAITED = "its steps wait for the result of one reduction before they call another"
TWICE = "its steps reduce a tensor twice, as a second backward pass outside no_sync() does"


class _Running(threading.local):
    """Whether this thread runs a callback of a reduction."""

    now = False


_running = _Running()


def noticed(callback: Callable[[Future[S]], T]) -> Callable[[Future[S]], T]:
    """``callback`` of a reduction, so that reductions which it calls are recognised as such. It
    runs on any thread: that of the script if the reduction is already complete."""

    def run(done: Future[S]) -> T:
        before, _running.now = _running.now, True
        try:
            return callback(done)
        finally:
            _running.now = before

    return run


class DependentSums:
    """The reductions of the present step or pass; any thread."""

    def __init__(self) -> None:
        self._reduced: set[Hashable] = set()
        """Where their tensors begin. DDP uses its buckets again after it has read them."""
        self._read = False
        self._serial = 0
        """Number of the step or pass."""

    def begin(self) -> None:
        """A step or pass begins."""
        self._reduced, self._read = set(), False
        self._serial += 1

    def reader(self) -> Callable[[], None]:
        """Returns what to call when the script waits for the reduction that it begins now."""
        return partial(self._read_of, self._serial)

    def _read_of(self, serial: int) -> None:
        if serial != self._serial:
            return  # the result of an earlier step is that of all ranks
        # A callback may only rescale the result. What it reduces itself is noticed by `call`.
        self._read |= not _in_callback()

    def call(self, tensors: Iterable[Tensor]) -> str:
        """The script reduces ``tensors``. Returns in what way they may depend on an earlier
        reduction of the step; empty if they do not."""
        if self._read or _in_callback():
            return WAITED
        places = {place_of(tensor) for tensor in tensors}
        if places & self._reduced:
            return TWICE
        self._reduced |= places
        return ""


def _in_callback() -> bool:
    return _running.now or in_callback()
