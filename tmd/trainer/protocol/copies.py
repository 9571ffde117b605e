"""A copy of a rank's whole state as frames, for memory and for links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import xxhash
from torch import Tensor

from tmd.core.values.errors import StateMismatch
from tmd.trainer.protocol.frames import Boundary, Unit, taken_apart
from tmd.trainer.protocol.outbox import OutboxEntry
from tmd.trainer.state.data import Position
from tmd.trainer.state.layout import Layouts


@dataclass(frozen=True, eq=False)
class StateCopy:
    """The state of ``rank`` at the start of ``step``, as frames: a boundary, then its units."""

    rank: int
    step: int
    layouts: Layouts
    entries: tuple[OutboxEntry, ...]
    digest: str

    @property
    def position(self) -> Position:
        """Data position of the rank."""
        return self._boundary[0].position

    def rest(self) -> tuple[Boundary, list[Tensor]]:
        """Everything that is not a unit, in fresh memory that the new owner may keep using."""
        boundary, tensors = self._boundary
        return boundary, [tensor.clone() for tensor in tensors]

    def units(self) -> Iterator[tuple[Unit, list[Tensor]]]:
        """The content of each unit."""
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
        """Raise StateMismatch if the copy has changed since it was made."""
        if digest_of_bodies(self.entries) != self.digest:
            raise StateMismatch(f"the copy of rank {self.rank} at step {self.step} is damaged")


def digest_of_bodies(entries: tuple[OutboxEntry, ...]) -> str:
    """Digest (hex) of all bytes of a copy."""
    found = xxhash.xxh3_128()
    for _, body in entries:
        found.update(body.numpy().data)
    return found.hexdigest()
