"""A step that a worker computes once for each rank that it holds: its passes.

With nobody left to take a lost rank, a survivor adopts it (``Membership.adopted``). In each step it
runs the script's loop body for every rank that it holds. Torch and the script keep seeing the whole
world, so each all-reduce must sum the inputs of all ranks: in all passes but the last it keeps its
input, and in the last one it communicates the sum. A barrier waits for the last pass. A broadcast
communicates in the first pass, and later passes get its result.

Hazard: a pass that is not the last has no results. A step may not use one for a later reduction
(:mod:`tmd.fabric.dependent_sums`).

Hazard: a worker with one rank has one pass, so broadcasts (of DDP's buffers, at the forward) must
come before all that waits for the last pass: reductions and barriers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakSet

import torch
from torch import Tensor

from tmd.core.values.errors import LinkError
from tmd.fabric.dependent_sums import DependentSums
from tmd.fabric.epoch_view import EpochView
from tmd.fabric.frame import FrameKind
from tmd.fabric.kept_calls import CollectiveCall
from tmd.fabric.reduction import combine_of

IN_STEPS = frozenset({FrameKind.ALLREDUCE, FrameKind.BROADCAST, FrameKind.BARRIER})
"""Operations that passes can share."""


class Inelastic(RuntimeError):
    """The script does what a worker cannot do for several ranks. ``why`` is the reason."""

    def __init__(self, why: str) -> None:
        super().__init__(f"a rank is adopted, but {why}")
        self.why = why


class Passes:
    """The present pass of this worker. Passes begin and end in the main thread; while ranks are
    adopted, only when no operation runs. :meth:`saw` and :meth:`refuse` are for any thread."""

    def __init__(self, standing: Callable[[], EpochView | None]) -> None:
        self._standing = standing
        self._logs: WeakSet[PassLog] = WeakSet()
        self._acting: int | None = None
        """The rank for which the script computes this pass; ``None`` between steps."""
        self.serial = self.first_serial = 0
        """Number of the pass, never reused, and of the first one of its step."""
        self.first = self.last = True
        self.sums = DependentSums()
        self.waits = False
        """Whether an operation of this pass waits for the last pass, in any group."""
        self.open = False
        """Whether a step has begun that has not come to its vote."""
        self.has_stepped = False
        """Whether a step has begun at all."""
        self.inelastic: str | None = None
        """Why this worker could not compute for several ranks; empty if it could, as far as known;
        ``None`` if the script has not asked for that, with ``register(elastic=True)``."""

    @property
    def held(self) -> tuple[int, ...]:
        """All ranks that this worker holds in the present epoch."""
        return () if (standing := self._standing()) is None else standing.held

    @property
    def shrunk(self) -> bool:
        """Whether workers of the present epoch have adopted ranks."""
        return (standing := self._standing()) is not None and standing.shrunk

    @property
    def acting(self) -> int:
        """The rank as which the script computes: that of the pass, and between steps the lowest."""
        return min(self.held, default=0) if self._acting is None else self._acting

    @property
    def seat(self) -> tuple[int, int]:
        """Number of this worker among those of the epoch, and how many these are.

        Raises:
            LinkError: it holds no rank.
        """
        if (standing := self._standing()) is None:
            raise LinkError("this worker holds no rank")
        return standing.seat

    def add(self, log: PassLog) -> None:
        """A group begins to run operations."""
        self._logs.add(log)

    @property
    def complete(self) -> bool:
        """Whether the last pass of a step has come to all that earlier ones have given."""
        return all(log.complete for log in list(self._logs))

    def request_elastic(self, why_not: str) -> None:
        """The script asks to compute for several ranks if need be. ``why_not``: why that cannot be;
        empty if it can."""
        self.inelastic = why_not

    def refuse(self, why: str) -> None:
        """From now on nothing can be computed for several ranks; the first reason stays."""
        if self.inelastic == "":
            self.inelastic = why

    def open_step(self) -> None:
        """The script begins to compute a step, or a pass of one."""
        self.open = self.has_stepped = True
        self.sums.begin()

    def begin(self, rank: int, *, first: bool, last: bool) -> None:
        """The pass for ``rank`` begins."""
        self._acting, self.first, self.last = rank, first, last
        self.waits = False
        self.serial += 1
        if first:
            self.first_serial = self.serial

    def end(self) -> None:
        """No pass is under way."""
        self._acting, self.first, self.last = None, True, True
        self.serial += 1
        self.first_serial = self.serial
        for log in list(self._logs):
            log.forget()

    def saw(
        self, kind: FrameKind, tensors: Sequence[Tensor] = (), *, objects: bool = False
    ) -> None:
        """The script calls an operation on ``tensors``; any thread."""
        # After their set-up scripts often call a barrier, once.
        in_step = self.open or (kind is FrameKind.BARRIER and not self.has_stepped)
        if self.inelastic == "":
            why = obstacle(kind, in_step=in_step, objects=objects)
            if not why and kind is FrameKind.ALLREDUCE:
                why = self.sums.call(tensors)
            if why:
                self.refuse(why)


def obstacle(kind: FrameKind, *, in_step: bool, objects: bool = False) -> str:
    """Why an operation cannot be shared by passes; empty if it can."""
    name = "send or recv" if kind is FrameKind.MESSAGE else kind.name.lower()
    if kind not in IN_STEPS or objects:
        return f"its script calls {name}{' of objects' * objects}"
    if not in_step:
        return f"its script calls {name} between two steps, or after the optimizer"
    return ""


class SharedOperation:
    """An operation of a step, and what its passes have given or got so far."""

    def __init__(self, call: CollectiveCall, tensors: Sequence[Tensor]) -> None:
        self._like = _signature(call, tensors)
        self.tensors: list[Tensor] = []
        self.given = ""
        """Digest of the input of the worker's own rank, if a joiner follows that."""

    def matches(self, call: CollectiveCall, tensors: Sequence[Tensor]) -> bool:
        return self._like == _signature(call, tensors)

    def keep(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [tensor.detach().clone() for tensor in tensors]


def _signature(call: CollectiveCall, tensors: Sequence[Tensor]) -> tuple[object, ...]:
    return call.kind, call.dtype, call.root, call.detail, tuple(t.shape for t in tensors)


class PassLog:
    """The operations of one group in the passes of a step.

    The thread that runs them uses :meth:`next` and :meth:`goes_out`; the main thread uses the rest,
    when none runs.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        passes.add(self)
        self._first_serial = self._serial = -1
        self._number = 0
        self._kept: list[SharedOperation] = []

    @property
    def complete(self) -> bool:
        """Whether the last pass has come to all operations of the earlier ones."""
        if self._passes.first or self._first_serial != self._passes.first_serial:
            return True
        return self._serial == self._passes.serial and self._number == len(self._kept)

    def next(self, call: CollectiveCall, tensors: Sequence[Tensor]) -> SharedOperation | None:
        """The operation ``call`` on ``tensors`` begins; ``None`` if there is one pass only.

        Raises:
            Inelastic: an earlier pass had another operation in this place.
        """
        self._turn()
        if self._passes.first and self._passes.last:
            return None
        if self._passes.first:
            self._kept.append(SharedOperation(call, tensors))
        number, self._number = self._number, self._number + 1
        if number >= len(self._kept) or not self._kept[number].matches(call, tensors):
            raise Inelastic("its steps call different operations for different ranks")
        return self._kept[number]

    def forget(self) -> None:
        """Drop what earlier passes have kept. No operation of several passes may run."""
        self._kept.clear()

    def _turn(self) -> None:
        if self._serial == self._passes.serial:
            return
        self._serial, self._number = self._passes.serial, 0
        if self._passes.first or self._first_serial != self._passes.first_serial:
            self._kept.clear()
        self._first_serial = self._passes.first_serial

    def goes_out(
        self, call: CollectiveCall, kept: SharedOperation, tensors: Sequence[Tensor]
    ) -> bool:
        """Take in, or fill, the ``tensors`` of this pass; returns whether they communicate now.

        Raises:
            Inelastic: they cannot be shared.
        """
        if call.kind is FrameKind.BROADCAST:
            return self._broadcast(call, kept, tensors)
        self._passes.waits = True
        if call.kind is FrameKind.ALLREDUCE:
            if self._passes.first:
                kept.keep(tensors)
            else:
                combine = combine_of(call.detail)
                for total, tensor in zip(kept.tensors, tensors, strict=True):
                    combine(total, tensor.detach(), out=total)
            if self._passes.last:
                for total, tensor in zip(kept.tensors, tensors, strict=True):
                    tensor.detach().copy_(total)
                kept.tensors = []
        return self._passes.last

    def _broadcast(
        self, call: CollectiveCall, kept: SharedOperation, tensors: Sequence[Tensor]
    ) -> bool:
        if self._passes.first:
            if self._passes.waits:
                raise Inelastic("its steps broadcast after a reduction or a barrier")
            return True
        if self._passes.acting == call.root:
            # An earlier pass has spoken for the root.
            same = (torch.equal(a, b) for a, b in zip(kept.tensors, tensors, strict=True))
            if not all(same):
                raise Inelastic(f"its steps broadcast what only rank {call.root} has computed")
        for held, tensor in zip(kept.tensors, tensors, strict=True):
            tensor.detach().copy_(held)
        return False
