"""The operations of one group in the current step.

After a loss the ranks may finish the step with a hot standby in the place of the lost rank. They
run the broken operation again, and those before it that not every rank has completed
(:mod:`tmd.fabric.kept_calls`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from tmd.core.worker.broken_step import Progress, Rerun
from tmd.fabric import device
from tmd.fabric.collectives.on_tensors import Body
from tmd.fabric.kept_calls import CollectiveCall, KeptCall, MemoryPool, keep, keep_parts

KEPT_BYTES = 64 << 20
"""Bound on the bytes of the tensors of the calls that a group keeps: about two buckets of DDP. The
oldest calls are dropped first."""
KEPT_AT_LEAST = 2
"""Operations that are kept whatever their size: the one that runs, and the one before it. Where all
ranks depend on all others, no rank is more than one operation ahead of another. Only a hot standby
may be further behind the rank that it follows."""


class StepLog:
    """The log of one group. Only the thread that runs the group's operations uses it; other
    threads may use it while no operation runs."""

    def __init__(self, bound: int = KEPT_BYTES) -> None:
        """``bound``: see :data:`KEPT_BYTES`."""
        self._bound = bound
        self._pool = MemoryPool(bound)
        self._kept: dict[int, KeptCall] = {}
        """Kept calls by the number of their operation. The numbers have no gaps."""
        self.to_repeat: deque[KeptCall] = deque()
        """Operations that are complete here but not on all ranks: they run once more."""
        self._bytes = 0
        self._unrepeatable = True
        """Whether the operations of the step cannot be run again."""
        self._done = self._begun = 0
        self._again = Rerun()
        """The operations with which a broken step goes on."""
        self._coming = Rerun()
        """The same, for the step that begins next here."""
        self.repeats = False
        """Whether the operation that runs broke before: its tensors may hold parts of a result."""

    def restart(self, *, keeps: bool) -> None:
        """Begin a step, while no operation runs. ``keeps``: whether to keep its operations, so
        that they can be run again."""
        while self._kept:
            self._drop_oldest()
        self.to_repeat.clear()
        if not keeps:
            self._pool = MemoryPool(self._bound)
        self._done, self._begun, self._unrepeatable = 0, 0, not keeps
        self._again, self._coming = self._coming, Rerun()

    def note_unrepeatable(self) -> None:
        """Note that the step has an operation that cannot be run again, such as a point-to-point
        message."""
        self._unrepeatable = True

    @property
    def progress(self) -> Progress:
        kept = min(self._kept, default=self._done)
        return Progress(self._done, -1 if self._unrepeatable else kept, self._begun)

    @property
    def nbytes(self) -> int:
        """Bytes of memory for copies."""
        return self._pool.nbytes

    def begin(self, call: CollectiveCall, inputs: Sequence[Tensor]) -> Body:
        """Begin the next operation on ``inputs``, for the first time or once more. Returns the
        function that runs it."""
        begun_before = self._done < self._again.until
        self._begun = self._done + 1
        kept = self._kept.get(self._done)
        self.repeats = kept is not None and kept.call is call
        if kept is not None and self.repeats:
            kept.restore(inputs)
        else:
            kept = self._keep(call, inputs)
        if kept is None and begun_before:
            # Nothing has to be kept, but all ranks must run the operation in the same way.
            kept = keep_parts(call, inputs)
        return call.body if kept is None else kept.body(begun_before=begun_before)

    def _keep(self, call: CollectiveCall, inputs: Sequence[Tensor]) -> KeptCall | None:
        # Asked of the call's own tensors: `inputs` may be copies in host memory.
        if call.objects or any(map(device.current().holds, (*call.inputs, *call.outputs))):
            self._unrepeatable = True
        if self._unrepeatable:
            return None
        nbytes = _held(call)
        while len(self._kept) >= KEPT_AT_LEAST and self._bytes + nbytes > self._bound:
            self._drop_oldest()
        self._kept[self._done] = kept = keep(call, inputs, self._pool)
        self._bytes += nbytes
        return kept

    def received(self, rank: int, ranks: Sequence[int]) -> None:
        """The running operation's outputs were received from ``rank``. ``ranks``: its group."""
        if (kept := self._kept.get(self._done)) is not None:
            kept.received(rank, ranks)

    def end(self) -> None:
        """The operation is complete."""
        if (kept := self._kept.get(self._done)) is not None:
            kept.completed()
        self._done += 1

    def go_back(self, again: Rerun) -> None:
        """Go on with the operations of ``again``. Those complete here go into ``to_repeat``."""
        self._again = again
        self.to_repeat = deque(self._kept[number] for number in range(again.first, self._done))

    def expect(self, again: Rerun) -> None:
        """In the next step here, the other ranks will go on with the operations of ``again``."""
        self._coming = again

    def _drop_oldest(self) -> None:
        dropped = self._kept.pop(min(self._kept))
        self._bytes -= _held(dropped.call)
        dropped.drop()


def _held(call: CollectiveCall) -> int:
    """Bytes of the tensors of a kept call."""
    outputs = () if call.outputs is call.inputs else call.outputs
    return sum(t.nbytes for t in (*call.inputs, *outputs))
