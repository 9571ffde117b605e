"""Operations that can be run again, and what a rank keeps for that.

Most operations overwrite their inputs, so these are copied before it runs. A large all-reduce, as
of a bucket of gradients, needs no copies: it is finished from what is in its tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from tmd.fabric.collectives.allreduce import Allreduce
from tmd.fabric.collectives.completion import finish
from tmd.fabric.collectives.halving import own_part
from tmd.fabric.collectives.on_tensors import Body
from tmd.fabric.collectives.op import Op
from tmd.fabric.collectives.parts import Parts
from tmd.fabric.frame import FrameKind
from tmd.fabric.memory import view

ALIGNED = 64
"""Bytes to whose multiple each copy begins."""
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


class Memory:
    """Memory for copies, which is used again: new pages would cost more than a copy."""

    def __init__(self, bound: int) -> None:
        """``bound``: bytes beyond which free memory is returned."""
        self._bound = bound
        self._free: list[Tensor] = []
        self.nbytes = 0
        """Bytes of memory, whether used or free."""

    def copies(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Contiguous copies of ``tensors``, and the memory that :meth:`give_back` takes."""
        sizes = [-(-t.nbytes // ALIGNED) * ALIGNED for t in tensors]
        memory = self.room(sum(sizes))
        parts = torch.split(memory[: sum(sizes)], sizes) if sizes else ()
        copies = [
            part[: t.nbytes].view(t.dtype).view(t.shape).copy_(t.detach())
            for part, t in zip(parts, tensors, strict=True)
        ]
        return copies, memory

    def give_back(self, memory: Tensor) -> None:
        """What is in ``memory`` is not needed any more."""
        self._free.append(memory)

    def room(self, size: int) -> Tensor:
        """Memory of at least ``size`` bytes with any content."""
        fitting = [memory for memory in self._free if size <= memory.numel() <= 2 * size]
        if fitting:
            found = min(fitting, key=Tensor.numel)
            self._free = [memory for memory in self._free if memory is not found]
            return found
        while self._free and self.nbytes + size > self._bound:
            self.nbytes -= self._free.pop(0).nbytes
        self.nbytes += size
        return torch.empty(size, dtype=torch.uint8)


class KeptCall(Protocol):
    """An operation that has begun, and that can be run again."""

    call: CollectiveCall

    def restore(self, tensors: Sequence[Tensor]) -> None:
        """It broke, and is about to run once more, now on ``tensors``."""
        ...

    def body(self, *, begun_elsewhere: bool) -> Body:
        """The function that runs it. ``begun_elsewhere``: whether another rank has begun it in an
        earlier epoch."""
        ...

    def received(self, rank: int, ranks: Sequence[int]) -> None:
        """Its outputs came from ``rank`` of the group of ``ranks``."""
        ...

    def completed(self) -> None:
        """The script has the outputs."""
        ...

    def repeat_for_others(self, op: Op) -> bool:
        """Run it for ranks that lack it, since it is complete here; returns whether its result is
        the same. Raises LinkError."""
        ...

    def drop(self) -> None:
        """It will not run again."""
        ...


def keep(call: CollectiveCall, tensors: Sequence[Tensor], memory: Memory) -> KeptCall:
    """Keep what it takes to run ``call`` again. ``tensors``: its inputs, as it will use them."""
    return keep_parts(call, tensors, memory) or KeptInputs(call, tensors, memory)


def keep_parts(call: CollectiveCall, tensors: Sequence[Tensor], memory: Memory) -> KeptParts | None:
    """The same for a large all-reduce; ``None`` for all other operations."""
    if isinstance(call.body, Allreduce) and Allreduce.has_parts(call.inputs):
        return KeptParts(call, call.body, tensors[0], memory)
    return None


class KeptInputs:
    """A call with copies of its inputs."""

    def __init__(self, call: CollectiveCall, tensors: Sequence[Tensor], memory: Memory) -> None:
        self.call = call
        self._pool = memory
        self.inputs, self._memory = memory.copies(tensors)
        self._result = b""
        """Digest of the outputs, if they are small: a script may change them."""

    def restore(self, tensors: Sequence[Tensor]) -> None:
        for tensor, before in zip(tensors, self.inputs, strict=True):
            tensor.copy_(before)

    def body(self, *, begun_elsewhere: bool) -> Body:
        return self.call.body

    def received(self, rank: int, ranks: Sequence[int]) -> None:
        pass

    def completed(self) -> None:
        if sum(t.nbytes for t in self.call.outputs) <= DIGESTED:
            self._result = _digest(self.call.outputs)

    def repeat_for_others(self, op: Op) -> bool:
        inputs = outputs = [tensor.clone() for tensor in self.inputs]
        if self.call.outputs is not self.call.inputs:
            outputs = [torch.empty(t.shape, dtype=t.dtype) for t in self.call.outputs]
        self.call.body(op, outputs, inputs)
        return self._gave(outputs)

    def _gave(self, outputs: Sequence[Tensor]) -> bool:
        """Whether the operation had exactly these ``outputs``.

        Without a digest the script's own tensors are compared, which it may have changed.
        """
        if self._result:
            return self._result == _digest(outputs)
        pairs = zip(self.call.outputs, outputs, strict=True)
        return all(torch.equal(_bits(mine), _bits(again)) for mine, again in pairs)

    def drop(self) -> None:
        self._pool.give_back(self._memory)


class KeptParts:
    """A large all-reduce. Partial sums need memory while it runs."""

    def __init__(
        self, call: CollectiveCall, body: Allreduce, tensor: Tensor, memory: Memory
    ) -> None:
        self.call = call
        self._allreduce = body
        self._pool = memory
        self._rooms: list[Tensor] = []
        self._parts = self._of(tensor)

    def _of(self, tensor: Tensor) -> Parts:
        # `.data`: autograd must not see what a standby writes into the script's tensor.
        return Parts(tensor.data.contiguous().view(-1), self._room)

    def _room(self, like: Tensor) -> Tensor:
        self._rooms.append(self._pool.room(like.nbytes))
        return self._rooms[-1][: like.nbytes].view(like.dtype)

    def restore(self, tensors: Sequence[Tensor]) -> None:
        self.drop()
        if self._parts.flat.data_ptr() != tensors[0].data_ptr():
            self._parts = self._of(tensors[0])  # a host copy for this attempt, of the inputs

    def body(self, *, begun_elsewhere: bool) -> Body:
        if begun_elsewhere:
            return lambda op, outputs, inputs: finish(op, self._parts, self._allreduce.reduction)
        return lambda op, outputs, inputs: self._allreduce.in_parts(op, self._parts)

    def received(self, rank: int, ranks: Sequence[int]) -> None:
        self._parts = self._of(self.call.outputs[0])
        if rank in ranks:
            start, stop = own_part(ranks.index(rank), len(ranks), self._parts.flat.numel())
            self._parts.seal(start).add(self._parts.flat[start:stop])

    def completed(self) -> None:
        self.drop()
        self._parts.completed()

    def repeat_for_others(self, op: Op) -> bool:
        finish(op, self._parts, self._allreduce.reduction)
        return True

    def drop(self) -> None:
        for room in self._rooms:
            self._pool.give_back(room)
        self._rooms = []


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _digest(tensors: Sequence[Tensor]) -> bytes:
    found = xxhash.xxh3_128()
    for tensor in tensors:
        bits = _bits(tensor)  # alive while it is read
        found.update(view(bits))
    return found.digest()
