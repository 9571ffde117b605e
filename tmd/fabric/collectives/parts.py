"""What the elements of a tensor hold while a large all-reduce overwrites it.

The operation never leaves an element half-written. It overwrites it with the sum of several ranks'
inputs, this rank's among them, and later with the final value. After a loss the ranks can finish
the operation from these, without copies of the inputs (:mod:`tmd.fabric.collectives.completion`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from tmd.core.values.errors import LinkError
from tmd.core.worker.broken_allreduce import Holding, PartialSum, Span
from tmd.fabric.memory import has_memory, view

NO_DIGEST = bytes(16)
"""Instead of the digest of a part, from a rank that has none."""


class Sealed(NamedTuple):
    """Consecutive elements that are final, and a digest of them.

    A script may change the result once it has received it. The digest tells whether it did.
    """

    start: int
    stop: int
    digest: bytes

    def copied(self, flat: Tensor) -> Tensor | None:
        """A copy of these elements of ``flat``; ``None`` if the script has changed them or freed
        their memory."""
        if not has_memory(flat):
            return None
        # Copied before they are compared: the script may change them at any time.
        values = flat[self.start : self.stop].clone()
        return values if xxhash.xxh3_128_digest(view(values)) == self.digest else None


class Sealing:
    """Consecutive elements that become final one after another."""

    def __init__(self, start: int) -> None:
        self.start = self.stop = start
        self._digest = xxhash.xxh3_128()

    def add(self, segment: Tensor) -> None:
        """Add the next elements, which are final: cheapest while they are in the CPU cache."""
        self._digest.update(view(segment))
        self.stop += segment.numel()

    def sealed(self) -> Sealed:
        """What has been added."""
        return Sealed(self.start, self.stop, self._digest.digest())


class GrowingSum:
    """Consecutive elements that become the sum of the inputs of ``ranks`` ranks."""

    def __init__(self, start: int, ranks: int) -> None:
        self.start = self.stop = start
        self.ranks = ranks

    def extend(self, segment: Tensor) -> None:
        """The next elements have been overwritten with their sum."""
        self.stop += segment.numel()


class Parts:
    """The parts of one tensor, and what they are. Used by one thread at a time."""

    def __init__(self, flat: Tensor) -> None:
        """``flat``: the tensor, in one dimension."""
        self.flat = flat
        self._sealing: list[Sealing] = []
        self._sealed: list[Sealed] = []
        self._final: list[Span] = []
        self._sums: list[GrowingSum] = []
        self._complete = False
        self._copies: list[tuple[int, Tensor]] = []

    def begin_chunk(self) -> None:
        """Begin a further chunk of the tensor: those before it are final."""
        self._sums = []

    def begin_sum(self, start: int, ranks: int) -> GrowingSum:
        """Begin a part at element ``start`` that becomes the sum of the inputs of ``ranks`` ranks,
        which are not all."""
        self._sums.append(GrowingSum(start, ranks))
        return self._sums[-1]

    def begin_sealing(self, start: int) -> Sealing:
        """Begin a part at element ``start``. A digest is kept of what is added to it."""
        self._sealing.append(Sealing(start))
        return self._sealing[-1]

    def seal(self, start: int, stop: int, digest: bytes) -> None:
        """These elements are final, and have this ``digest``."""
        if digest == NO_DIGEST:
            digest = xxhash.xxh3_128_digest(view(self.flat[start:stop]))
        self._sealed.append(Sealed(start, stop, digest))

    @contextmanager
    def receiving(self, start: int, stop: int) -> Iterator[None]:
        """Note what becomes final while one message overwrites elements ``start`` to ``stop``, in
        order and each as a whole."""
        try:
            yield
        except LinkError as error:
            arrived = error.arrived // self.flat.element_size()
            self._final.append((start, min(start + arrived, stop)))
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
            sealed = [(part.start, part.stop) for part in self._sealing]
            sealed += [(part.start, part.stop) for part in self._sealed]
            sums = (PartialSum(part.start, part.stop, part.ranks) for part in self._sums)
            return Holding(_merged((*sealed, *self._final)), tuple(sums))
        parts = (*(part.sealed() for part in self._sealing), *self._sealed)
        found = [(part.start, part.copied(self.flat)) for part in parts]
        self._copies = [(start, values) for start, values in found if values is not None]
        given = [(start, start + len(values)) for start, values in self._copies]
        return Holding(tuple(given), inputs=False)

    def values(self, start: int, stop: int) -> Tensor:
        """A copy of these elements, as :meth:`holding` described them. Uninitialized memory if the
        script has the result and this rank has no unchanged copy."""
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
        self.begin_sealing(start).add(values)

    def forget_copies(self) -> None:
        """Drop the copies that :meth:`holding` made."""
        self._copies = []


def _merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The fewest spans that cover the same elements, since they must fit into one message."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        elif start < stop:
            found.append((start, stop))
    return tuple(found)
