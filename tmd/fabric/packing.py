"""Copies many tensors between a device and host memory, with few waits.

A copy from or to ordinary host memory waits for the device each time, which may take longer than
the copy. The copies of this module go through pieces of page-locked memory, and wait once for each
piece.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tmd.fabric import device
from tmd.fabric.memory import is_plain, plain

Pair = tuple[Tensor, Tensor]
"""Source and target, flat and of equal size in bytes."""


class Pieces:
    """Pieces of page-locked memory: as many as threads have copied at the same time."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._free: list[Tensor] = []
        self._changing = threading.Lock()

    def batches(self, pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
        """``pairs``, cut and put together so that each batch fits into a piece."""
        batch: list[Pair] = []
        room = self._nbytes
        for source, target in pairs:
            while source.numel():
                batch.append((source[:room], target[:room]))
                source, target, room = source[room:], target[room:], room - len(source[:room])
                if not room:
                    yield batch
                    batch, room = [], self._nbytes
        if batch:
            yield batch

    @contextmanager
    def piece(self, batch: Sequence[Pair]) -> Iterator[list[Tensor]]:
        """Parts of a piece, one for each pair; another thread may use it afterwards."""
        with self._changing:
            piece = self._free.pop() if self._free else None
        if piece is None:
            piece = device.current().host_memory((self._nbytes,), torch.uint8, locked=True)
        sizes = [len(source) for source, _ in batch]
        yield list(torch.split(piece[: sum(sizes)], sizes))
        # Not after an error: a copy may still run.
        with self._changing:
            self._free.append(piece)


PIECES = Pieces(1 << 24)


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: uint8 [bytes], on its device. A view if it is plain, else a copy."""
    return plain(tensor.detach()).reshape(-1).view(torch.uint8)


def pack(tensors: Sequence[Tensor], body: Tensor, pieces: Pieces = PIECES) -> None:
    """Copy the bytes of ``tensors``, one after another, to ``body``: uint8 [bytes] in host memory.

    The copies run in this thread's current stream, and are complete at the return.
    """

    def to_piece() -> Iterator[Pair]:
        # Lazy: the bytes of a tensor that is not contiguous are a copy on the device.
        offset = 0
        for tensor in tensors:
            flat = flat_bytes(tensor)
            target = body[offset : offset + flat.numel()]
            offset += flat.numel()
            if device.current().holds(flat):
                yield flat, target
            else:
                target.copy_(flat)

    for batch in pieces.batches(to_piece()):
        with pieces.piece(batch) as views:
            for view, (source, _) in zip(views, batch, strict=True):
                view.copy_(source, non_blocking=True)
            device.current().queued(source for source, _ in batch).wait()
            for view, (_, target) in zip(views, batch, strict=True):
                target.copy_(view)


def unpack(values: Sequence[Tensor], targets: Sequence[Tensor], pieces: Pieces = PIECES) -> None:
    """Copy ``values``, in host memory, to ``targets`` of their shapes and dtypes.

    The copies run in this thread's current stream, and are complete at the return.
    """
    there: list[Pair] = []
    for value, target in zip(values, targets, strict=True):
        if device.current().holds(target) and is_plain(target):
            there.append((flat_bytes(value), flat_bytes(target)))
        else:
            target.copy_(value)
    for batch in pieces.batches(there):
        with pieces.piece(batch) as views:
            for view, (source, _) in zip(views, batch, strict=True):
                view.copy_(source)
            for view, (_, target) in zip(views, batch, strict=True):
                target.copy_(view, non_blocking=True)
            device.current().queued(target for _, target in batch).wait()
