"""A worker without a rank: its collectives do not communicate.

Their outputs come from a source: neutral values, the live outputs of the shadowed rank, or one
recorded step of it. The user's script cannot tell the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class OutputSource(Protocol):
    """Provides the outputs of collectives in the sandbox."""

    def outputs(
        self, op: str, group: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        """Fill ``outputs`` in place. Called in program order per group, and may block.

        Raises LinkError if they never come.

        ``op`` is the lower-case name of a :class:`tmd.fabric.frame.FrameKind`, or ``send``,
        ``recv`` or ``recv_anysource``. The ``group`` of a receive includes its sender and tag. For
        in-place operations ``outputs`` and ``inputs`` are the same tensors.
        """
        ...

    def spoil(self) -> None:
        """The step is void: from now on no output comes."""
        ...

    def vote(self, values: Sequence[int]) -> tuple[int, ...]:
        """The outcome of a vote in which this rank votes ``values``. Raises LinkError."""
        ...

    def shift(self, payload: bytes, offset: int) -> bytes:
        """The payload that this rank receives in a shift. Raises LinkError."""
        ...


@dataclass(frozen=True)
class Sandbox:
    """The rank that the groups report, and the source of their outputs."""

    source: OutputSource
    rank: int
    size: int


class Neutral:
    """Values of the right shape: the worker's own data if there is some; messages are ones."""

    def outputs(
        self, op: str, group: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        """As if every rank had the same data as this one."""
        match op:
            case "allgather" | "gather":
                _repeat(outputs, inputs)
            case "reduce_scatter" | "scatter" | "alltoall":
                _overwrite(outputs, inputs)
            case "recv" | "recv_anysource":
                # Pipeline stages multiply their votes on whether shapes are known.
                for out in outputs:
                    out.data.fill_(1)
            case _:
                pass  # in place or without output: the own data stays

    def spoil(self) -> None:
        pass

    def vote(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)

    def shift(self, payload: bytes, offset: int) -> bytes:
        return payload


def _repeat(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Fill each output with copies of its input; several outputs may belong to one input."""
    if not inputs or not outputs:
        return
    share = len(outputs) // len(inputs)
    for i, out in enumerate(outputs):
        own = inputs[min(i // max(share, 1), len(inputs) - 1)].data
        if own.numel() == 0 or out.numel() % own.numel():
            continue
        out.data.copy_(own.reshape(-1).repeat(out.numel() // own.numel()).view(out.shape))


def _overwrite(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Fill the outputs, taken as one sequence, from the inputs, then with zeros."""
    parts = [part.data.reshape(-1) for part in inputs]
    for out in outputs:
        wanted, filled = out.data.view(-1) if out.is_contiguous() else out.data.reshape(-1), 0
        while filled < wanted.numel() and parts:
            piece = parts[0][: wanted.numel() - filled]
            wanted[filled : filled + piece.numel()] = piece
            parts[0] = parts[0][piece.numel() :]
            if parts[0].numel() == 0:
                parts.pop(0)
            filled += piece.numel()
        wanted[filled:] = 0
        if not out.is_contiguous():
            out.data.copy_(wanted.view(out.shape))
