"""The header before each message on a link: the operation that the sender is in.

Both ends of a link know what comes next. A different header is the first sign that two ranks have
diverged; the resulting error shows both sides.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import NamedTuple

from tmd.core.values.errors import LinkError

_LAYOUT = Struct("<QQBBHiQ")
HEADER_SIZE = _LAYOUT.size
VOTE, SHIFT = "@vote", "@shift"
"""The groups of the runtime's own messages, which contain every rank."""
BYE = b"\xff" * HEADER_SIZE
"""In place of a header: the sender closes the link in good order."""


class FrameKind(IntEnum):
    """The operation that a message belongs to."""

    ALLREDUCE = 1
    BROADCAST = 2
    REDUCE = 3
    ALLGATHER = 4
    GATHER = 5
    SCATTER = 6
    REDUCE_SCATTER = 7
    ALLTOALL = 8
    BARRIER = 9
    MESSAGE = 10
    VOTE = 11
    SHIFT = 12


class FrameHeader(NamedTuple):
    """All fields except the size are equal at both ends of a message."""

    epoch: int
    seq: int
    """Number of the operation in its group and epoch; unused (0) for messages."""
    kind: int
    dtype: int = 0
    """Code of the element type, see :mod:`tmd.fabric.reduction`."""
    root: int = 0
    detail: int = 0
    """Reduce operation of a reduction, tag of a message."""

    def packed(self, size: int) -> bytes:
        """The bytes sent before a payload of ``size`` bytes."""
        return _LAYOUT.pack(*self, size)


def unpacked(raw: bytes | bytearray | memoryview) -> tuple[FrameHeader, int]:
    """Header and size of the payload, without judging them."""
    *fields, size = _LAYOUT.unpack(raw)
    return FrameHeader(*fields), size


def _shown(raw: bytes | bytearray | memoryview) -> str:
    header, size = unpacked(raw)
    try:
        name = FrameKind(header.kind).name.lower()
    except ValueError:
        name = f"unknown kind {header.kind}"
    return (
        f"{name} #{header.seq} of epoch {header.epoch} ({size} bytes, type {header.dtype}, "
        f"root {header.root}, detail {header.detail})"
    )


def check(raw: bytes | bytearray | memoryview, expected: bytes, peer: str) -> None:
    """Raise LinkError unless ``peer`` sent the ``expected`` header."""
    if raw != expected:
        raise LinkError(f"out of step: {peer} sent {_shown(raw)}, expected {_shown(expected)}")
