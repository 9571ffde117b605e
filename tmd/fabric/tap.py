"""Who looks on at what a rank does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Tap(Protocol):
    """Sees what this rank puts into every operation and gets out of it."""

    def given(self, op: str, group: str, inputs: Sequence[Tensor]) -> None:
        """A collective is about to communicate; the next output of ``group`` is its result."""
        ...

    def output(self, op: str, group: str, outputs: Sequence[Tensor]) -> None:
        """A collective, or a message (``/sender/tag`` after its group), before it may change."""
        ...

    def voted(self, result: Sequence[int]) -> None:
        """A vote."""
        ...

    def shifted(self, offset: int, payload: bytes) -> None:
        """A shift by ``offset``: what came from the other rank."""
        ...
