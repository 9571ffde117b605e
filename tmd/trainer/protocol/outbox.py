"""Frames that wait to be sent to a joiner: copies in host memory, up to a bound.

Training adds frames without waiting; if one does not fit the joiner cannot keep up.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from tmd.fabric import device
from tmd.fabric.packing import pack
from tmd.trainer.protocol.frames import Envelope, Frame, specs_of

OutboxEntry = tuple[Envelope, Tensor]


class Outbox:
    """Bounded queue that reuses its memory. ``put`` from any thread."""

    def __init__(self, bound: int) -> None:
        """``bound``: bytes in the queue and kept for reuse, together."""
        self._bound = bound
        self._held = 0
        self._closed = False
        self._free: dict[int, list[Tensor]] = {}
        self._queue: deque[OutboxEntry] = deque()
        self._woken = False
        self._changed = threading.Condition()

    @property
    def held(self) -> int:
        """Bytes of host memory in use."""
        return self._held

    def put(self, frame: Frame, tensors: Sequence[Tensor] = ()) -> bool:
        """Queue a copy of ``tensors`` with ``frame``; ``False`` if it exceeds the bound."""
        entry = self.copy(frame, tensors)
        if entry is None:
            return False
        with self._changed:
            if self._closed:
                return False
            self._queue.append(entry)
            self._changed.notify_all()
        return True

    def copy(self, frame: Frame, tensors: Sequence[Tensor]) -> OutboxEntry | None:
        """``frame`` with a copy of ``tensors``, not queued; ``None`` above the bound."""
        size = sum(t.nbytes for t in tensors)
        body = self._take(size)
        if body is None:
            return None
        pack(tensors, body)
        return Envelope(frame, specs_of(tensors)), body

    def wake(self) -> None:
        """End the current :meth:`wait`, or the next one."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait for an entry or a wake-up, at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._woken, seconds)
            self._woken = False

    def next(self) -> OutboxEntry | None:
        """The oldest entry, or ``None``. Return its memory with :meth:`back`."""
        with self._changed:
            return self._queue.popleft() if self._queue else None

    def back(self, body: Tensor) -> None:
        """Return the body of an entry that was sent."""
        with self._changed:
            if not self._closed:
                self._free.setdefault(body.numel(), []).append(body)

    def forget(self) -> None:
        """Drop all entries and memory; nothing is accepted afterwards."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._free.clear()
            self._held = 0

    def _take(self, size: int) -> Tensor | None:
        with self._changed:
            if self._closed:
                return None
            if found := self._free.get(size):
                return found.pop()
            while self._held + size > self._bound and self._free:
                kept, buffers = self._free.popitem()
                self._held -= kept * len(buffers)
            if self._held + size > self._bound:
                return None
            self._held += size
        return device.current().host_memory((size,), torch.uint8)
