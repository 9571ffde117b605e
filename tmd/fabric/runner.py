"""Runs the operations of one group in order, whatever the current mode is.

The same call communicates, takes its outputs from the sandbox's source, or (in a poisoned epoch)
does nothing. The mode is decided when the operation runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tmd.core.values.errors import LinkError
from tmd.fabric import device
from tmd.fabric.collectives.on_tensors import Body
from tmd.fabric.collectives.op import Op
from tmd.fabric.device import Queued
from tmd.fabric.epoch_view import EpochView
from tmd.fabric.fabric import Fabric
from tmd.fabric.frame import FrameHeader, FrameKind
from tmd.fabric.grouping import GroupView
from tmd.fabric.link import Link
from tmd.fabric.memory import Scratch
from tmd.fabric.objects import empty
from tmd.fabric.sandbox import Neutral, OutputSource
from tmd.fabric.serial_executor import SerialExecutor
from tmd.fabric.staging import HostCopies
from tmd.fabric.work import Work


@dataclass(frozen=True)
class CollectiveCall:
    """A collective as it was called. ``body`` runs it on contiguous CPU tensors."""

    kind: FrameKind
    body: Body
    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    dtype: int = 0
    root: int = 0
    detail: int = 0
    objects: bool = False
    """See :class:`OutputRequest`."""


@dataclass(frozen=True)
class OutputRequest:
    """The description of an operation for the sandbox's source."""

    op: str
    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    queued: Queued = device.NOTHING
    """What the caller's stream had queued on the tensors' device when it called."""
    channel: str = ""
    """Within the group: operations of other channels may overtake this one."""
    objects: bool = False
    """Whether the outputs are parts of objects that another rank sends."""


class Runner:
    """The executor and the sequence numbers of the group ``view``."""

    def __init__(self, fabric: Fabric, view: GroupView, patience: float, *, strict: bool) -> None:
        """``patience``: seconds without a byte after which an operation fails.

        ``strict``: an aborted operation raises from ``wait``; for use without a vote.
        """
        self.fabric = fabric
        self.view = view
        self.patience = patience
        self.strict = strict
        self.lane = SerialExecutor(f"tmd-group-{view.name}")
        self._scratch = Scratch()
        self._standing: EpochView | None = None
        self.seq = 0

    def submit(self, call: CollectiveCall, *, inline: bool, results: Sequence[Tensor]) -> Work:
        """Queue ``call``; ``results`` is the value of the future."""
        work = Work(results, self.fabric.blocked)
        staged = HostCopies(call.outputs, call.inputs, self.fabric.blocked)
        act = lambda: self._perform(call, staged, work)  # noqa: E731
        if inline:
            # In the caller's thread, which waits there for its peers anyway.
            with self.fabric.blocked:
                self.lane.run(act, inline=True)
        else:
            self.lane.run(act, inline=False)
        return work

    def _perform(self, call: CollectiveCall, staged: HostCopies, work: Work) -> None:
        self.fabric.calls.ran += 1
        op = call.kind.name.lower()
        request = OutputRequest(op, call.outputs, call.inputs, staged.queued, objects=call.objects)
        self.guarded(work, request, lambda standing: self._communicate(call, staged, standing))

    def guarded(
        self, work: Work, request: OutputRequest, act: Callable[[EpochView], bool | None]
    ) -> None:
        """Complete ``work`` with ``act`` or the sandbox's source; never raises.

        ``act`` returns ``False`` if another thread will complete it.
        """
        sandbox, standing = self.fabric.sandboxed, self.fabric.standing
        error: Exception | None = None
        try:
            if standing is not None:
                if act(standing) is False:
                    return
            elif sandbox is not None:
                self._simulate(sandbox.source, request)
            else:
                error = RuntimeError("the fabric has neither a rank nor a sandbox")
        except LinkError as e:
            if standing is not None:
                standing.blame(e)
            error = self.judged(e)
        except Exception as e:  # an error in the call: the other ranks must not wait
            if standing is not None:
                standing.poison(f"rank {standing.rank} failed in {request.op}: {e!r}")
            error = e
        work.finish(error)

    def _simulate(self, source: OutputSource, request: OutputRequest) -> None:
        name = self.view.name + request.channel
        with device.after(request.queued):
            source.outputs(request.op, name, request.outputs, request.inputs)
            if request.objects and isinstance(source, Neutral):
                empty(request.outputs)

    def judged(self, error: LinkError | None) -> LinkError | None:
        """The error that ``wait`` raises for an operation aborted by ``error``."""
        return error if self.strict else None

    def mirror(
        self, op: str, outputs: Sequence[Tensor], channel: str = "", *, given: str = ""
    ) -> None:
        """Pass the outputs of a communicating operation to the fabric's tap."""
        if self.fabric.tap is not None:
            self.fabric.tap.output(op, self.view.name + channel, outputs, given)

    def _communicate(self, call: CollectiveCall, staged: HostCopies, standing: EpochView) -> None:
        if standing.poisoned:
            raise LinkError(standing.reason)
        op = Op(
            self.view.ranks.index(standing.rank),
            len(self.view.ranks),
            self._header(call, standing),
            lambda rank: self._link(standing, rank),
            self._scratch,
        )
        with staged as (outputs, inputs):
            tap, given = self.fabric.tap, ""
            if tap is not None:
                given = tap.given(call.kind.name.lower(), self.view.name, inputs)
            call.body(op, outputs, inputs)
        self.fabric.counters.bytes += sum(t.nbytes for t in outputs)
        self.mirror(call.kind.name.lower(), staged.outputs, given=given)

    def _header(self, call: CollectiveCall, standing: EpochView) -> FrameHeader:
        # A joiner has not counted along: numbering restarts with each epoch.
        self.seq = self.seq + 1 if self._standing is standing else 0
        self._standing = standing
        return FrameHeader(standing.epoch, self.seq, call.kind, call.dtype, call.root, call.detail)

    def _link(self, standing: EpochView, rank: int) -> Link:
        link = standing.link(self.view.name, self.view.ranks[rank])
        if link.timeout_ms is None:
            link.patience(self.patience)
        return link
