"""Operations that can be run again, and what a rank keeps for that.

Most operations overwrite their inputs, so the inputs are copied before an operation runs. A large
all-reduce, such as that of a bucket of gradients, needs no copies: it is finished from what its
tensor still holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from tmd.fabric.collectives.allreduce import Allreduce
from tmd.fabric.collectives.completion import finish
from tmd.fabric.collectives.halving import own_parts
from tmd.fabric.collectives.on_tensors import Body
from tmd.fabric.collectives.op import Op
from tmd.fabric.collectives.parts import Parts
from tmd.fabric.frame import FrameKind
from tmd.fabric.memory import empty_bytes, has_memory, view, writable
from tmd.fabric.packing import flat_bytes

ALIGNED = 64
"""Each copy begins at a multiple of this many bytes."""
DIGEST_LIMIT = 1 << 20
"""A digest of the outputs is kept if they have at most this many bytes. Larger outputs are compared
themselves: if the script has changed them, as by clipping, they count as different."""


class CollectiveCall(NamedTuple):
    """A collective as it was called. ``body`` runs it on contiguous CPU tensors.

    A call that works in place has the same object as ``outputs`` and as ``inputs``.
    """

    kind: FrameKind
    body: Body
    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    dtype: int = 0
    root: int = 0
    detail: int = 0
    objects: bool = False
    """See :class:`tmd.fabric.runner.OutputRequest`."""
    emptied: bool = False
    """Whether the outputs carry a pickled object, and were filled with a pickled ``None``
    beforehand. If the operation breaks they are filled so again."""


class MemoryPool:
    """A pool of memory for copies: new pages would cost more than a copy."""

    def __init__(self, bound: int) -> None:
        """``bound``: total bytes beyond which the pool releases free memory."""
        self._bound = bound
        self._free: list[Tensor] = []
        self.nbytes = 0
        """Bytes of memory, whether used or free."""

    def copies(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Contiguous copies of ``tensors``, and the memory to pass to :meth:`give_back` later."""
        sizes = [-(-t.nbytes // ALIGNED) * ALIGNED for t in tensors]
        memory = self._room(sum(sizes))
        parts = torch.split(memory[: sum(sizes)], sizes) if sizes else ()
        copies = [
            part[: t.nbytes].view(t.dtype).view(t.shape).copy_(t.detach())
            for part, t in zip(parts, tensors, strict=True)
        ]
        return copies, memory

    def give_back(self, memory: Tensor) -> None:
        """Return ``memory`` to the pool; its content is not needed any more."""
        self._free.append(memory)

    def _room(self, size: int) -> Tensor:
        """Memory of at least ``size`` bytes with any content."""
        fitting = [memory for memory in self._free if size <= memory.numel() <= 2 * size]
        if fitting:
            found = min(fitting, key=Tensor.numel)
            self._free = [memory for memory in self._free if memory is not found]
            return found
        while self._free and self.nbytes + size > self._bound:
            self.nbytes -= self._free.pop(0).nbytes
        self.nbytes += size
        return empty_bytes(size)


class KeptCall(Protocol):
    """An operation that has begun, and that can be run again."""

    call: CollectiveCall

    def restore(self, tensors: Sequence[Tensor]) -> None:
        """Prepare to run it once more after it broke, now on ``tensors``."""
        ...

    def body(self, *, begun_before: bool) -> Body:
        """The function that runs it. ``begun_before``: whether any rank, perhaps this one, began
        it in an earlier epoch."""
        ...

    def received(self, rank: int, ranks: Sequence[int]) -> None:
        """Its outputs were received from ``rank`` instead of computed. ``ranks``: its group."""
        ...

    def completed(self) -> None:
        """Note that it is complete: the script has the outputs and may change them."""
        ...

    def repeat_for_others(self, op: Op) -> bool:
        """Run it, complete here, once more for ranks that have not completed it. Returns whether
        the result is the same as before. Raises LinkError."""
        ...

    def drop(self) -> None:
        """Release the memory that is held now."""
        ...


def keep(call: CollectiveCall, tensors: Sequence[Tensor], pool: MemoryPool) -> KeptCall:
    """Keep what it takes to run ``call`` again. ``tensors``: its inputs, as it will use them."""
    return keep_parts(call, tensors) or KeptInputs(call, tensors, pool)


def keep_parts(call: CollectiveCall, tensors: Sequence[Tensor]) -> KeptParts | None:
    """Keep what a large all-reduce needs to be finished; ``None`` for all other operations."""
    if isinstance(call.body, Allreduce) and call.body.has_parts(call.inputs):
        return KeptParts(call, call.body, tensors[0])
    return None


class KeptInputs:
    """A call with copies of its inputs."""

    def __init__(self, call: CollectiveCall, tensors: Sequence[Tensor], pool: MemoryPool) -> None:
        self.call = call
        self._pool = pool
        self.inputs, self._memory = pool.copies(tensors)
        self._digest_of_outputs = b""
        """Taken on completion, since the script may change the outputs then; empty for outputs of
        more than ``DIGEST_LIMIT`` bytes."""

    def restore(self, tensors: Sequence[Tensor]) -> None:
        for tensor, before in zip(tensors, self.inputs, strict=True):
            tensor.detach().copy_(before)

    def body(self, *, begun_before: bool) -> Body:
        return self.call.body

    def received(self, rank: int, ranks: Sequence[int]) -> None:
        pass

    def completed(self) -> None:
        if sum(t.nbytes for t in self.call.outputs) <= DIGEST_LIMIT:
            self._digest_of_outputs = _digest(self.call.outputs)

    def repeat_for_others(self, op: Op) -> bool:
        inputs = outputs = [tensor.clone() for tensor in self.inputs]
        if self.call.outputs is not self.call.inputs:
            outputs = [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in self.call.outputs]
        self.call.body(op, outputs, inputs)
        return self._matches(outputs)

    def _matches(self, outputs: Sequence[Tensor]) -> bool:
        """Whether the operation had exactly these ``outputs``.

        Without a digest they are compared with the script's tensors, which it may have changed.
        """
        if self._digest_of_outputs:
            return self._digest_of_outputs == _digest(outputs)
        pairs = zip(self.call.outputs, outputs, strict=True)
        return all(
            has_memory(mine) and torch.equal(flat_bytes(mine), flat_bytes(again))
            for mine, again in pairs
        )

    def drop(self) -> None:
        self._pool.give_back(self._memory)


class KeptParts:
    """A large all-reduce, without copies of its inputs: its tensor is enough to finish it."""

    def __init__(self, call: CollectiveCall, body: Allreduce, tensor: Tensor) -> None:
        self.call = call
        self._allreduce = body
        self._parts = _parts_of(tensor)

    def restore(self, tensors: Sequence[Tensor]) -> None:
        if self._parts.flat.data_ptr() != tensors[0].data_ptr():
            # `tensors[0]` is a new host copy of the inputs, made for this attempt.
            self._parts = _parts_of(tensors[0])

    def body(self, *, begun_before: bool) -> Body:
        if begun_before:
            return lambda op, outputs, inputs: finish(op, self._parts, self._allreduce.reduction)
        return lambda op, outputs, inputs: self._allreduce.in_parts(op, self._parts)

    def received(self, rank: int, ranks: Sequence[int]) -> None:
        self._parts = _parts_of(self.call.outputs[0])
        if rank in ranks:
            # This rank stands in for `rank` now: it must serve the part that `rank` has reduced.
            flat = self._parts.flat
            for start, stop in own_parts(ranks.index(rank), len(ranks), flat):
                self._parts.begin_sealing(start).add(flat[start:stop])

    def completed(self) -> None:
        self._parts.completed()

    def repeat_for_others(self, op: Op) -> bool:
        finish(op, self._parts, self._allreduce.reduction)
        return True

    def drop(self) -> None:
        pass


def _parts_of(tensor: Tensor) -> Parts:
    return Parts(writable(tensor).view(-1))


def _digest(tensors: Sequence[Tensor]) -> bytes:
    found = xxhash.xxh3_128()
    for tensor in tensors:
        bits = flat_bytes(tensor)  # alive while it is read
        found.update(view(bits))
    return found.digest()
