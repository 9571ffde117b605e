"""The operations of one group in the present step.

After a loss the ranks may finish the step with a hot standby in the place of the lost rank. They
run the broken operation again, and those before it that not every rank has completed
(:mod:`tmd.fabric.kept_calls`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from tmd.core.worker.broken_step import Progress, Rerun
from tmd.fabric.collectives.on_tensors import Body
from tmd.fabric.kept_calls import CollectiveCall, KeptCall, Memory, keep, keep_parts

KEPT_BYTES = 64 << 20
"""Bytes of tensors of the calls that a group keeps, about two buckets of DDP. The oldest are
dropped first."""
KEPT_AT_LEAST = 2
"""Operations that are kept whatever their size: the one that runs, and the one before it. Where all
ranks depend on all others, no rank is more than one operation ahead of another. Only the standby
that follows may be further behind."""


class StepLog:
    """Used by the thread that runs the group's operations; by others only while none runs."""

    def __init__(self, bound: int = KEPT_BYTES) -> None:
        """``bound``: see :data:`KEPT_BYTES`."""
        self._bound = bound
        self._memory = Memory(bound)
        self._kept: dict[int, KeptCall] = {}
        """Kept calls by the number of their operation. The numbers have no gaps."""
        self.behind: deque[KeptCall] = deque()
        """Complete operations that another rank has not completed: they run once more."""
        self._bytes = 0
        self._broken = True
        """Whether the operations of the step cannot be run again."""
        self._done = self._begun = 0
        self._again = self._coming = Rerun()
        self.repeats = False
        """Whether the operation that runs broke before: its tensors may hold parts of a result."""

    def restart(self, *, keeps: bool) -> None:
        """A step begins. ``keeps``: whether its operations can be run again: none may run now."""
        while self._kept:
            self._drop_oldest()
        self.behind.clear()
        if not keeps:
            self._memory = Memory(self._bound)
        self._done, self._begun, self._broken = 0, 0, not keeps
        self._again, self._coming = self._coming, Rerun()

    def refuse(self) -> None:
        """Note that the step has an operation that cannot be run again, such as a message."""
        self._broken = True

    @property
    def progress(self) -> Progress:
        kept = min(self._kept, default=self._done)
        return Progress(self._done, -1 if self._broken else kept, self._begun)

    @property
    def nbytes(self) -> int:
        """Bytes of memory for copies and partial sums."""
        return self._memory.nbytes

    def begin(self, call: CollectiveCall, inputs: Sequence[Tensor]) -> Body:
        """The next operation runs on ``inputs``, for the first time or once more; returns its
        work."""
        elsewhere = self._done < self._again.until
        self._begun = self._done + 1
        kept = self._kept.get(self._done)
        self.repeats = kept is not None and kept.call is call
        if kept is not None and self.repeats:
            kept.restore(inputs)
        else:
            kept = self._keep(call, inputs)
        if kept is None and elsewhere:
            # Nothing has to be kept, but all ranks must run the operation in the same way.
            kept = keep_parts(call, inputs, self._memory)
        return call.body if kept is None else kept.body(begun_elsewhere=elsewhere)

    def _keep(self, call: CollectiveCall, inputs: Sequence[Tensor]) -> KeptCall | None:
        if call.objects or any(t.device.type != "cpu" for t in inputs):
            self._broken = True
        if self._broken:
            return None
        coming = _held(call)
        while len(self._kept) >= KEPT_AT_LEAST and self._bytes + coming > self._bound:
            self._drop_oldest()
        self._kept[self._done] = kept = keep(call, inputs, self._memory)
        self._bytes += coming
        return kept

    def received(self, rank: int, ranks: Sequence[int]) -> None:
        """The outputs of the operation that runs came from ``rank`` of the group of ``ranks``."""
        if (kept := self._kept.get(self._done)) is not None:
            kept.received(rank, ranks)

    def end(self) -> None:
        """The operation is complete."""
        if (kept := self._kept.get(self._done)) is not None:
            kept.completed()
        self._done += 1

    def go_back(self, again: Rerun) -> None:
        """Go on with the operations of ``again``: complete ones run once more."""
        self._again = again
        self.behind = deque(self._kept[number] for number in range(again.first, self._done))

    def expect(self, again: Rerun) -> None:
        """Other ranks go on with the operations of ``again`` in the step that begins next here."""
        self._coming = again

    def _drop_oldest(self) -> None:
        dropped = self._kept.pop(min(self._kept))
        self._bytes -= _held(dropped.call)
        dropped.drop()


def _held(call: CollectiveCall) -> int:
    """Bytes of the tensors of a kept call."""
    outputs = () if call.outputs is call.inputs else call.outputs
    return sum(t.nbytes for t in (*call.inputs, *outputs))
