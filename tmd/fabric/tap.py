"""Observes the operations of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Tap(Protocol):
    """Receives the inputs and outputs of every operation of this rank."""

    @property
    def follows(self) -> bool:
        """Whether anybody receives them now, or may from the next step on."""
        ...

    def given(self, op: str, group: str, inputs: Sequence[Tensor]) -> str:
        """A collective is about to communicate. Returns what to pass on with its outputs."""
        ...

    def output(self, op: str, group: str, outputs: Sequence[Tensor], given: str = "") -> None:
        """The result of a collective or message (``/sender/tag`` follows its group), unmodified.

        ``given``: what :meth:`given` returned for it.
        """
        ...

    def voted(self, result: Sequence[int]) -> None:
        """The result of a vote."""
        ...

    def shifted(self, offset: int, payload: bytes) -> None:
        """A shift by ``offset``, and the received payload."""
        ...
