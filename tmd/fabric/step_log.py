"""The operations of one group in the present step, and copies of the inputs of the last ones.

After a loss the ranks may finish the step with a hot standby in the place of the lost rank. They
run the broken operation again, and those before it that not every rank has completed. For that an
operation's inputs are copied before it runs, since most operations overwrite them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from tmd.core.worker.broken_step import Progress
from tmd.fabric.collectives.on_tensors import Body
from tmd.fabric.frame import FrameKind
from tmd.fabric.memory import view

ALIGNED = 64
"""Bytes to whose multiple each copy begins."""
KEPT_BYTES = 64 << 20
"""Bytes that a group keeps, about two buckets of DDP. The oldest are dropped first."""
KEPT_AT_LEAST = 2
"""Operations whose inputs are kept whatever their size: the one that runs, and the one before it.
Where all ranks depend on all others, no rank is more than one operation ahead of another. Only the
standby that follows may be further behind."""
DIGESTED = 1 << 20
"""Bytes of outputs up to which their digest is kept. Scripts change buffers in the same step, but
hardly ever large gradients."""


class CollectiveCall(NamedTuple):
    """A collective as it was called. ``body`` runs it on contiguous CPU tensors."""

    kind: FrameKind
    body: Body
    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    dtype: int = 0
    root: int = 0
    detail: int = 0
    objects: bool = False
    """See :class:`tmd.fabric.runner.OutputRequest`."""


class KeptCall(NamedTuple):
    """An operation that can be run again."""

    call: CollectiveCall
    inputs: list[Tensor]
    """Copies."""
    memory: Tensor
    """What holds them."""
    result: bytes = b""
    """Digest of the outputs, if they are small: a script may change them."""

    def afresh(self) -> CollectiveCall:
        """The same operation on tensors of its own."""
        inputs = [tensor.clone() for tensor in self.inputs]
        if self.call.outputs is self.call.inputs:
            return self.call._replace(outputs=inputs, inputs=inputs)
        outputs = [torch.empty(t.shape, dtype=t.dtype) for t in self.call.outputs]
        return self.call._replace(outputs=outputs, inputs=inputs)

    def gave(self, outputs: Sequence[Tensor]) -> bool:
        """Whether the operation had exactly these ``outputs``.

        Without a digest the script's own tensors are compared, which it may have changed.
        """
        if self.result:
            return self.result == _digest(outputs)
        pairs = zip(self.call.outputs, outputs, strict=True)
        return all(torch.equal(_bits(mine), _bits(again)) for mine, again in pairs)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _digest(tensors: Sequence[Tensor]) -> bytes:
    found = xxhash.xxh3_128()
    for tensor in tensors:
        bits = _bits(tensor)  # alive while it is read
        found.update(view(bits))
    return found.digest()


class Copies:
    """Copies of tensors in memory that is used again: new pages would cost more than the copy."""

    def __init__(self, bound: int) -> None:
        """``bound``: bytes beyond which free memory is returned."""
        self._bound = bound
        self._free: list[Tensor] = []
        self.nbytes = 0
        """Bytes of memory, whether used or free."""

    def take(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Contiguous copies of ``tensors``, and the memory that :meth:`give_back` takes."""
        sizes = [-(-t.nbytes // ALIGNED) * ALIGNED for t in tensors]
        memory = self._memory(sum(sizes))
        parts = torch.split(memory[: sum(sizes)], sizes) if sizes else ()
        copies = [
            part[: t.nbytes].view(t.dtype).view(t.shape).copy_(t.detach())
            for part, t in zip(parts, tensors, strict=True)
        ]
        return copies, memory

    def give_back(self, memory: Tensor) -> None:
        """The copies in ``memory`` are not needed any more."""
        self._free.append(memory)

    def _memory(self, size: int) -> Tensor:
        fitting = [memory for memory in self._free if size <= memory.numel() <= 2 * size]
        if fitting:
            found = min(fitting, key=Tensor.numel)
            self._free = [memory for memory in self._free if memory is not found]
            return found
        while self._free and self.nbytes + size > self._bound:
            self.nbytes -= self._free.pop(0).nbytes
        self.nbytes += size
        return torch.empty(size, dtype=torch.uint8)


class StepLog:
    """Used by the thread that runs the group's operations; by others only while none runs."""

    def __init__(self, bound: int = KEPT_BYTES) -> None:
        """``bound``: see :data:`KEPT_BYTES`."""
        self._bound = bound
        self._copies = Copies(bound)
        self._kept: dict[int, KeptCall] = {}
        """Kept calls by the number of their operation. The numbers have no gaps."""
        self.behind: deque[KeptCall] = deque()
        """Complete operations that another rank has not completed: they run once more."""
        self._bytes = 0
        self._keeps = False
        self._broken = True
        self._done = 0

    def restart(self, *, keeps: bool) -> None:
        """A step begins. ``keeps``: whether its operations can be run again: none may run now."""
        while self._kept:
            self._drop_oldest()
        self.behind.clear()
        if not keeps:
            self._copies = Copies(self._bound)
        self._done, self._keeps, self._broken = 0, keeps, not keeps

    def refuse(self) -> None:
        """Note that the step has an operation that cannot be run again, such as a message."""
        self._broken = True

    @property
    def progress(self) -> Progress:
        kept = min(self._kept, default=self._done)
        return Progress(self._done, -1 if self._broken else kept)

    @property
    def nbytes(self) -> int:
        """Bytes of memory for copies."""
        return self._copies.nbytes

    def begin(self, call: CollectiveCall, inputs: Sequence[Tensor]) -> None:
        """The next operation runs on ``inputs``, for the first time or once more."""
        if not self._keeps:
            return
        kept = self._kept.get(self._done)
        if kept is not None and kept.call is call:
            for tensor, before in zip(inputs, kept.inputs, strict=True):
                tensor.copy_(before)
            return
        if call.objects or any(t.device.type != "cpu" for t in inputs):
            self._broken = True
        if self._broken:
            return
        coming = _held(call)
        while len(self._kept) >= KEPT_AT_LEAST and self._bytes + coming > self._bound:
            self._drop_oldest()
        self._kept[self._done] = KeptCall(call, *self._copies.take(inputs))
        self._bytes += coming

    def end(self) -> None:
        """The operation is complete."""
        if (kept := self._kept.get(self._done)) is not None:
            outputs = kept.call.outputs
            if sum(t.nbytes for t in outputs) <= DIGESTED:
                self._kept[self._done] = kept._replace(result=_digest(outputs))
        self._done += 1

    def go_back(self, first: int) -> None:
        """Let the complete operations from number ``first`` on run once more."""
        self.behind = deque(self._kept[number] for number in range(first, self._done))

    def _drop_oldest(self) -> None:
        dropped = self._kept.pop(min(self._kept))
        self._bytes -= _held(dropped.call)
        self._copies.give_back(dropped.memory)


def _held(call: CollectiveCall) -> int:
    """Bytes that a kept call holds: copies of its inputs, and its outputs if they are others."""
    outputs = () if call.outputs is call.inputs else call.outputs
    return sum(t.nbytes for t in (*call.inputs, *outputs))
