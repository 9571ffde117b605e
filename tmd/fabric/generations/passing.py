"""A process group that passes its collectives to the live generation of an inner group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tmd.fabric import device
from tmd.fabric.collectives.on_tensors import Body
from tmd.fabric.frame import FrameKind
from tmd.fabric.generations.generation import Generation
from tmd.fabric.generations.inner import Inner
from tmd.fabric.generations.operations import Operation, Operations
from tmd.fabric.group import Group
from tmd.fabric.objects import under_way
from tmd.fabric.reduction import Reduction
from tmd.fabric.unfinished_step import StepState
from tmd.fabric.untraced import untraced
from tmd.fabric.work import Work
from tmd.torch_private.c10d import Work as TorchWork

PASSED = {
    "allreduce": "allreduce",
    "allreduce_coalesced": "allreduce_coalesced",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "allgather",
    "_allgather_base": "_allgather_base",
    "all_gather_single": "_allgather_base",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "alltoall": "alltoall",
    "alltoall_base": "alltoall_base",
    "all_to_all_single": "alltoall_base",
}
"""Collective of a group -> method of a backend. All others stay with tmd's own algorithms: barriers
have no tensors, torch gives backends no public coalesced forms, and NCCL would open a communicator
for each pair of ranks when they first exchange a message."""


PARTS = (torch.int64, torch.uint8)
"""Types of the parts of an object."""

ELSEWHERE = Reduction(0, torch.add)
"""Stands for a reduction that is not computed here."""


class Launched(TorchWork):
    """A synchronous call of NCCL, which returns no work: it runs in the caller's own stream."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._queued = device.current().queued(tensors)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let the current stream come after it."""
        self._queued.precede()
        return True

    def is_completed(self) -> bool:
        return self._queued.done


class Call(NamedTuple):
    """A collective as the script has called it, and the group that carries it; ``None`` if a member
    is lost."""

    generation: Generation | None
    inner: Inner | None
    name: str
    args: Sequence[Any]
    named: dict[str, Any]


class _Mirrored(threading.local):
    """The call of this thread whose tensors are to be mirrored."""

    call: Call | None = None


_mirrored = _Mirrored()


class PassingGroup(Group):
    """A :class:`Group` whose collectives an inner group carries, if it can carry their tensors.

    In the sandbox no inner group is called. Once a generation is aborted its calls complete at once
    without a result: the vote drops the step.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._operations = Operations()
        super().__init__(*args, **options)

    # --- calls ---------------------------------------------------------------------------------

    def _passes(self, args: Sequence[Any]) -> bool:
        """Whether an inner group carries a call."""
        first = next(_tensors(args), None)
        if first is None or not self._fabric.generations.takes(first):
            return False
        if self._fabric.step.state is StepState.FAILED:
            return False  # the other ranks do not call it
        # An abort would leave the size of an object undefined; tmd's own way makes it that of None.
        return self._fabric.standing is not None and not (first.dtype in PARTS and under_way())

    def _in_use(self, args: Sequence[Any]) -> tuple[Generation | None, Inner | None]:
        """The generation and its inner group, which may have to be built first; no inner group if a
        member is lost."""
        place = next(_tensors(args)).device
        with self._fabric.blocked:
            generation, inner = self._fabric.generations.in_use(self.view, place)
        if inner is None and generation is not None and generation.failure:
            self._fabric.poison(f"group {self.view.name} cannot be built: {generation.failure}")
        return generation, inner

    def _pass(self, call: Call) -> Any:
        tensors = list(_tensors(call.args))
        queued = device.current().queued(tensors)
        self._fabric.blocked.called()
        self._runner.log.note_unrepeatable()
        lost, work = self._carried(call)
        if lost or call.generation is None:
            work = Work(list(_tensors(call.args[:1])), self._fabric.blocked)
            work.finish()
        else:
            work = Launched(tensors) if work is None else work
            running = Operation(call.name, call.generation, work, queued, tensors)
            self._check(self._operations.add(running))
        self._fabric.calls.ran += 1
        return work

    def _check(self, error: object) -> None:
        """Poison the epoch if an operation has ended with ``error``: its result is undefined."""
        if error is not None:
            self._fabric.poison(f"group {self.view.name}: {error}")

    def _carried(self, call: Call) -> tuple[bool, Any]:
        """Whether a member is lost, and what the inner group returned."""
        if call.inner is None or self._fabric.poisoned:
            return True, None
        try:
            return False, getattr(call.inner.backend, call.name)(*call.args, **call.named)
        except Exception as error:
            # A peer's end may show here before any link reports it. Only a mistake of the script
            # may end this process, and the other ranks must not wait for it.
            poisoned = self._fabric.poisoned
            self._fabric.poison(f"rank {self._fabric.rank} failed in {call.name}: {error!r}")
            if not poisoned and not isinstance(error, dist.DistError):
                raise
        return True, None

    # --- mirrored calls --------------------------------------------------------------------------

    def _carried_elsewhere(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a call that is being made computes nothing here: its inner group does, or in the
        sandbox that of the rank that is shadowed."""
        sandboxed = self._fabric.standing is None
        first = next(iter(tensors), None)
        return _mirrored.call is not None or (
            sandboxed and first is not None and self._fabric.generations.takes(first)
        )

    def _reduction(self, name: str, opts: Any, tensors: Sequence[Tensor]) -> Reduction:
        try:
            return super()._reduction(name, opts, tensors)
        except ValueError:  # an inner group has reductions and types that tmd's own way lacks
            if not self._carried_elsewhere(tensors):
                raise
            return ELSEWHERE

    def _type_code(self, kind: FrameKind, tensors: Sequence[Tensor]) -> int:
        try:
            return super()._type_code(kind, tensors)
        except ValueError:
            if not self._carried_elsewhere(tensors):
                raise
            return 0

    def _submit(
        self,
        kind: FrameKind,
        body: Body,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any,
        **rest: Any,
    ) -> Work:
        call, _mirrored.call = _mirrored.call, None
        if call is None:
            return super()._submit(kind, body, outputs, inputs, opts, **rest)
        return self._begun(self._mirror(call, kind.name.lower(), outputs, inputs, opts))

    def _mirror(
        self, call: Call, op: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        """Run ``call``, and complete once the shadows have a copy of its outputs: the script may
        change them as soon as it has them."""
        tap = self._fabric.tap
        work = Work(outputs, self._fabric.blocked, self._runner.callbacks)
        assert tap is not None
        given = tap.given(op, self.view.name, inputs)
        queued = device.current().queued(outputs)
        passed = self._pass(call)

        def copy() -> None:
            try:
                with queued.aside():
                    passed.wait()
                    if not self._fabric.poisoned:
                        self._runner.mirror(op, outputs, given=given)
            except Exception as error:
                self._fabric.poison(f"{op} of group {self.view.name} failed: {error!r}")
            work.finish()

        # In the order of the calls, as a shadow expects the outputs.
        self._runner.lane.run(copy, inline=not getattr(opts, "asyncOp", True))
        return work

    # --- called by the fabric --------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return super().busy or self._operations.busy

    @property
    def waits(self) -> bool:
        return super().waits or self._operations.waits

    def rest(self) -> None:
        """As in :class:`Group`. A copy of outputs waits for the device, whose end is watched once a
        member is lost."""
        if not self._runner.lane.busy:
            return super().rest()
        fabric = self._fabric
        with fabric.generations.aborts.settling(self.view.name, lambda: fabric.poisoned):
            super().rest()

    def settle(self) -> None:
        """Wait for what inner groups run. If a member is lost, its abort ends them."""
        if not (running := list(self._operations)):
            return
        fabric = self._fabric
        with fabric.generations.aborts.settling(self.view.name, lambda: fabric.poisoned):
            # In the order of the calls: what the device still computes before an operation is this
            # rank's own, once the earlier ones have ended.
            for each in running:
                self._settle_one(each)
        for each in running:
            self._check(each.error)
        self._operations.let_go(running)

    def _settle_one(self, operation: Operation) -> None:
        blocked, queued = self._fabric.blocked, operation.queued
        if queued:
            with blocked.computing():
                queued.wait()
        # The wait is only queued, so it goes to a stream that the script does not use.
        with blocked, queued.aside():
            try:
                operation.work.wait()
            except Exception as error:
                self._check(f"{operation.name}: {error!r}")

    def drain(self, timeout: float) -> bool:
        return self._settles_within(timeout) and super().drain(timeout)

    def _settles_within(self, seconds: float) -> bool:
        if not self._operations:
            return True
        name = f"tmd-settle-{self.view.name}"
        thread = threading.Thread(target=self.settle, name=name, daemon=True)
        thread.start()
        thread.join(seconds)
        return not thread.is_alive()

    def shutdown(self) -> None:
        super().shutdown()
        self._fabric.generations.destroy_group(self.view.name)


def _passing(name: str, inner: str) -> Any:
    own: Callable[..., Any] = getattr(Group, name)

    def collective(self: PassingGroup, *args: Any, **named: Any) -> Any:
        self._runner.callbacks.rest()
        if not self._passes(args):
            return own(self, *args, **named)
        generation, found = self._in_use(args)
        if found is not None and found.backend is None:
            return own(self, *args, **named)
        call = Call(generation, found, inner, args, named)
        if self._fabric.tap is None or not self._fabric.tap.follows:
            return self._begun(self._pass(call))
        _mirrored.call = call
        try:
            return own(self, *args, **named)
        finally:
            _mirrored.call = None

    return untraced(collective)


for _name, _inner in PASSED.items():
    setattr(PassingGroup, _name, _passing(_name, _inner))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
