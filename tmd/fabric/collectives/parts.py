"""Which parts of a tensor are final while a large all-reduce overwrites it.

The operation overwrites an element of its tensor only with the final value, at once. So every
element holds either the rank's input or the result. After a loss the ranks can finish the operation
without copies of the inputs (:mod:`tmd.fabric.collectives.completion`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import xxhash
from torch import Tensor

from tmd.core.values.errors import LinkError
from tmd.core.worker.broken_step import Holding, Span
from tmd.fabric.memory import has_memory, view


class Sealed:
    """Consecutive elements that are final, and a digest of them.

    A script may change the result once it has received it. The digest tells whether it did.
    """

    def __init__(self, start: int) -> None:
        self.start = self.stop = start
        self._digest = xxhash.xxh3_128()

    def add(self, segment: Tensor) -> None:
        """Add the next elements, which are final: cheapest while they are in the CPU cache."""
        self._digest.update(view(segment))
        self.stop += segment.numel()

    def copied(self, flat: Tensor) -> Tensor | None:
        """A copy of these elements of ``flat``; ``None`` if the script has changed them or freed
        their memory."""
        if not has_memory(flat):
            return None
        # Copied before they are compared: the script may change them at any time.
        values = flat[self.start : self.stop].clone()
        same = xxhash.xxh3_128_digest(view(values)) == self._digest.digest()
        return values if same else None


class Parts:
    """The parts of one tensor, and which of them are final. Used by one thread at a time."""

    def __init__(self, flat: Tensor, room: Callable[[Tensor], Tensor]) -> None:
        """``flat``: the tensor, in one dimension; ``room`` returns uninitialized memory with the
        length and type of its argument, for partial sums."""
        self.flat = flat
        self.room = room
        self._sealed: list[Sealed] = []
        self._final: list[Span] = []
        self._complete = False
        self._copies: list[tuple[int, Tensor]] = []

    def begin_sealed(self, start: int) -> Sealed:
        """Begin a part at element ``start``. A digest is kept of what is added to it."""
        self._sealed.append(Sealed(start))
        return self._sealed[-1]

    @contextmanager
    def receiving(self, start: int, stop: int) -> Iterator[None]:
        """Note what becomes final while one message overwrites elements ``start`` to ``stop``, in
        order and each at once."""
        try:
            yield
        except LinkError as error:
            self._final.append((start, start + error.arrived // self.flat.element_size()))
            raise
        self._final.append((start, stop))

    def completed(self) -> None:
        """The script has the result, and may change it from now on."""
        self._complete = True

    # --- once the operation has to be finished -------------------------------------------------

    def holding(self) -> Holding:
        """What this rank has. If the script has the result, copies what can still be given, for
        :meth:`values`."""
        if not self._complete:
            sealed = ((part.start, part.stop) for part in self._sealed)
            return Holding(_merged((*sealed, *self._final)))
        found = [(part.start, part.copied(self.flat)) for part in self._sealed]
        self._copies = [(start, values) for start, values in found if values is not None]
        given = [(start, start + len(values)) for start, values in self._copies]
        return Holding(tuple(given), inputs=False)

    def values(self, start: int, stop: int) -> Tensor:
        """A copy of these elements: the result or the input. Uninitialized memory if the script
        has the result and this rank has no unchanged copy."""
        if not self._complete:
            return self.flat[start:stop].clone()
        for at, values in self._copies:
            if at <= start and stop <= at + len(values):
                return values[start - at : stop - at]
        return torch.empty_like(self.flat[start:stop])

    def put(self, start: int, values: Tensor) -> None:
        """Write the final values of the elements from ``start`` on. Does nothing if the script
        already has the result."""
        if self._complete:
            return
        self.flat[start : start + len(values)].copy_(values)
        self.begin_sealed(start).add(values)

    def forget_copies(self) -> None:
        """Drop the copies that :meth:`holding` made."""
        self._copies = []


def _merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """As few spans as have the same elements: they must fit into a message."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        elif start < stop:
            found.append((start, stop))
    return tuple(found)
