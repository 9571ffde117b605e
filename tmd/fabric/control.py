"""The vote and the shift: the runtime's own messages among the ranks, outside torch.

Both run in the caller's thread, over their own links. They raise LinkError instead of completing
with garbage: here the caller must know.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from struct import Struct, pack, unpack
from typing import TypeVar

from tmd.core.values.errors import LinkError
from tmd.fabric.collectives.doubling import recursive_doubling
from tmd.fabric.collectives.op import Op
from tmd.fabric.epoch_view import EpochView
from tmd.fabric.frame import SHIFT, VOTE, FrameHeader, FrameKind
from tmd.fabric.memory import Scratch

_SIZE = Struct("<Q")
MAX_SHIFT = 1 << 40
T = TypeVar("T")


class Control:
    """The two control groups of a fabric; both contain every rank."""

    def __init__(self) -> None:
        self._locks = {VOTE: threading.Lock(), SHIFT: threading.Lock()}
        self._scratch = Scratch()
        self._seq: dict[str, tuple[EpochView | None, int]] = {VOTE: (None, 0), SHIFT: (None, 0)}

    @property
    def busy(self) -> bool:
        """Whether a vote or a shift is running."""
        return any(lock.locked() for lock in self._locks.values())

    def reduce_min(self, standing: EpochView, values: Sequence[int]) -> tuple[int, ...]:
        """Element-wise minimum over all ranks; raises LinkError."""
        layout = f"<{len(values)}q"
        data = memoryview(bytearray(pack(layout, *values)))
        received = memoryview(bytearray(len(data)))

        def merge(lower: bool) -> None:
            pairs = zip(unpack(layout, data), unpack(layout, received), strict=True)
            data[:] = pack(layout, *map(min, pairs))

        def vote(op: Op) -> tuple[int, ...]:
            recursive_doubling(op, data, received, merge)
            return unpack(layout, data)

        return self._run(standing, VOTE, FrameKind.VOTE, vote)

    def shift(self, standing: EpochView, payload: bytes, offset: int) -> bytes:
        """Send to rank + offset, receive from rank - offset; raises LinkError. If workers have
        adopted ranks, to and from the worker that is so many places away."""

        def exchange(op: Op) -> bytes:
            to, source = (op.rank + offset) % op.size, (op.rank - offset) % op.size
            if to == op.rank:
                return payload
            announced = memoryview(bytearray(_SIZE.size))
            op.swap(to, memoryview(_SIZE.pack(len(payload))), source, announced)
            (size,) = _SIZE.unpack(announced)
            if size > MAX_SHIFT:
                raise LinkError(f"rank {source} announced {size} bytes")
            data = memoryview(bytearray(size))
            arrivals = iter((data,) if size else ())
            queue = deque([memoryview(payload)] if payload else [])
            op.stream(to, queue, len(payload), source, arrivals, size)
            return bytes(data)

        return self._run(standing, SHIFT, FrameKind.SHIFT, exchange)

    def _run(self, standing: EpochView, group: str, kind: FrameKind, body: Callable[[Op], T]) -> T:
        with self._locks[group]:
            if standing.poisoned:
                raise LinkError(standing.reason or "the epoch was abandoned")
            last, seq = self._seq[group]
            seq = seq + 1 if last is standing else 0
            self._seq[group] = standing, seq
            crew = standing.crew
            op = Op(
                *standing.seat,
                FrameHeader(standing.epoch, seq, kind),
                lambda place: standing.link(group, crew[place]),
                self._scratch,
            )
            try:
                return body(op)
            except LinkError as e:
                standing.blame(e)
                raise
