"""Copies of states in the memory of this host, to which ranks can go back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import xxhash
from torch import Tensor

from tmd.core.errors import StateMismatch
from tmd.core.snapshots import Kept
from tmd.trainer.data import Position
from tmd.trainer.frames import Boundary, Unit, taken_apart
from tmd.trainer.outbox import Entry
from tmd.trainer.state import Layouts


@dataclass(frozen=True, eq=False)
class Copy:
    """The state of ``rank`` at the start of ``step``, as frames: a boundary, then its units."""

    rank: int
    step: int
    layouts: Layouts
    entries: tuple[Entry, ...]
    digest: str
    buckets: str = ""
    """How gradients were summed on the rank; the keeper may be one that sums otherwise."""

    @property
    def position(self) -> Position:
        """Where in its data the rank stood."""
        return self._boundary[0].position

    def rest(self) -> tuple[Boundary, list[Tensor]]:
        """All that is no unit, in memory of its own: what it is put into may go on to use it."""
        boundary, tensors = self._boundary
        return boundary, [tensor.clone() for tensor in tensors]

    def units(self) -> Iterator[tuple[Unit, list[Tensor]]]:
        """What is to be copied to each unit."""
        for envelope, body in self.entries[1:]:
            if not isinstance(envelope.frame, Unit):
                raise StateMismatch(f"{type(envelope.frame).__name__} in place of a unit")
            yield envelope.frame, taken_apart(envelope, body)

    @property
    def _boundary(self) -> tuple[Boundary, list[Tensor]]:
        envelope, body = self.entries[0]
        frame = envelope.frame
        if not isinstance(frame, Boundary) or frame.rest is None:
            raise StateMismatch("a copy begins with a boundary and the rest of the state")
        return frame, taken_apart(envelope, body)

    def check(self) -> None:
        """Raise StateMismatch unless it is still what was copied."""
        if digest_of_bodies(self.entries) != self.digest:
            raise StateMismatch(f"the copy of rank {self.rank} at step {self.step} is damaged")


def digest_of_bodies(entries: tuple[Entry, ...]) -> str:
    """Digest (hex) of all bytes of a copy."""
    found = xxhash.xxh3_128()
    for _, body in entries:
        found.update(body.numpy().data)
    return found.hexdigest()


class Shelf:
    """Copies by rank and step; of one ``batches()`` call, the newest that is known. Any thread."""

    def __init__(
        self, tell: Callable[[tuple[Kept, ...]], None], freed: Callable[[Copy], None]
    ) -> None:
        """``tell`` is called with what is here at each change, ``freed`` with what has gone."""
        self._tell = tell
        self._freed = freed
        self._copies: dict[tuple[int, int], Copy] = {}
        self._call = 0
        self._changing = threading.Lock()

    def put(self, copy: Copy) -> bool:
        """Keep ``copy``; ``False`` if it is of a call that is over."""
        call = copy.position.call
        with self._changing:
            if call < self._call:
                return False
            if call > self._call:
                # Who is there has seen all ranks come to the end of the call before.
                self._leave(lambda step: False)
                self._call = call
            before = self._copies.pop((copy.rank, copy.step), None)
            self._copies[copy.rank, copy.step] = copy
            if before is not None:
                self._freed(before)
            self._told()
        return True

    def get(self, rank: int, step: int) -> Copy | None:
        return self._copies.get((rank, step))

    def only(self, step: int) -> None:
        """No other step is needed any more."""
        with self._changing:
            self._leave(lambda kept: kept == step)

    def drop(self, step: int) -> None:
        """Of ``step`` there will be no whole snapshot."""
        with self._changing:
            self._leave(lambda kept: kept != step)

    def clear(self, call: int) -> None:
        """Nobody goes back to before ``call``."""
        with self._changing:
            self._call = max(call, self._call)
            self._leave(lambda step: False)

    def _leave(self, wanted: Callable[[int], bool]) -> None:
        gone = [key for key in self._copies if not wanted(key[1])]
        for key in gone:
            self._freed(self._copies.pop(key))
        if gone:
            self._told()

    def _told(self) -> None:
        self._tell(tuple(sorted(Kept(rank, step) for rank, step in self._copies)))
