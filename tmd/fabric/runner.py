"""Runs the operations of one group in order, whatever the current mode is.

The same call communicates, takes its outputs from the sandbox's source, or (in a poisoned epoch)
does nothing. The mode is decided when the operation runs. An operation that breaks in a step that
may be finished with another worker waits, and runs again (:mod:`tmd.fabric.unfinished_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import ref

from torch import Tensor

from tmd.core.values.errors import LinkError
from tmd.core.worker.broken_step import Rerun
from tmd.fabric import device
from tmd.fabric.callbacks import Callbacks
from tmd.fabric.collectives import on_tensors
from tmd.fabric.collectives.on_tensors import Body
from tmd.fabric.collectives.op import Op
from tmd.fabric.device import Queued
from tmd.fabric.epoch_view import EpochView
from tmd.fabric.fabric import Fabric
from tmd.fabric.frame import FrameHeader, FrameKind
from tmd.fabric.grouping import GroupView
from tmd.fabric.kept_calls import CollectiveCall
from tmd.fabric.link import Link
from tmd.fabric.memory import Scratch, writing
from tmd.fabric.objects import empty
from tmd.fabric.passes import Inelastic, PassLog, obstacle
from tmd.fabric.sandbox import Neutral, OutputSource
from tmd.fabric.serial_executor import SerialExecutor
from tmd.fabric.staging import HostCopies
from tmd.fabric.step_log import StepLog
from tmd.fabric.unfinished_step import StepState
from tmd.fabric.work import Work

UNWIND_S = 1.0
"""Longest time until a thread that has completed its last operation has ended it."""
INDEX_BYTES = 1 << 20
"""Size of the whole numbers of one operation that a script may take sizes from."""


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
    emptied: bool = False
    """See :attr:`tmd.fabric.kept_calls.CollectiveCall.emptied`."""


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
        self.callbacks = Callbacks(view.name, fabric.blocked)
        self._scratch = Scratch()
        self._standing: EpochView | None = None
        self.log = StepLog()
        self.pass_log = PassLog(fabric.passes)
        self.seq = 0
        self._latest: ref[Work] | None = None
        """Weak, since a Work holds the tensors of its result."""

    def submit(self, call: CollectiveCall, *, inline: bool, results: Sequence[Tensor]) -> Work:
        """Queue ``call``; ``results`` is the value of the future."""
        self.callbacks.rest()
        passes = self.fabric.passes
        passes.saw(call.kind, call.outputs, objects=call.objects)
        if not self.fabric.calls.of_step():
            # Another rank may count it to another step: none could say which of them lacks it.
            self.log.note_unrepeatable()
        read = passes.sums.reader() if call.kind is FrameKind.ALLREDUCE else None
        work = Work(results, self.fabric.blocked, self.callbacks, read)
        self._latest = ref(work)
        staged = HostCopies(call.outputs, call.inputs, self.fabric.blocked)
        act = lambda: self._perform(call, staged, work)  # noqa: E731
        if inline:
            # In the caller's thread, which waits there for its peers anyway.
            with self.fabric.blocked:
                self.lane.run(act, inline=True)
        else:
            self.lane.run(act, inline=False)
        return work

    def comes_to_rest(self) -> bool:
        """Whether nothing runs or is queued. If the last collective is complete, this waits briefly
        for its thread to leave the operation."""
        latest = None if self._latest is None else self._latest()
        is_done = latest is None or latest.is_completed()
        return not self.lane.busy or (is_done and self.lane.drain(UNWIND_S))

    def rest(self) -> None:
        """Wait for the collectives called so far, for those that are run again for other ranks, and
        for the callbacks that are attached to any of them."""
        self.callbacks.rest()
        if self.lane.busy:
            with self.fabric.blocked:
                self.lane.drain(None)

    def _perform(self, call: CollectiveCall, staged: HostCopies, work: Work) -> None:
        self.fabric.calls.ran += 1
        op = call.kind.name.lower()
        request = OutputRequest(
            op,
            call.outputs,
            call.inputs,
            staged.queued,
            objects=call.objects,
            emptied=call.emptied,
        )

        def act(standing: EpochView) -> None:
            self._catch_up(standing)
            self._communicate(call, staged, standing)

        self.guarded(work, request, act, call)

    def guarded(
        self,
        work: Work,
        request: OutputRequest,
        act: Callable[[EpochView], bool | None],
        call: CollectiveCall | None = None,
    ) -> None:
        """Complete ``work`` with ``act`` or the sandbox's source; never raises.

        ``act`` returns ``False`` if another thread will complete it. ``call``: the operation, if it
        can be run again.
        """
        step = self.fabric.step
        if call is None:
            self.log.note_unrepeatable()
        if not step.enter():
            self.log.note_unrepeatable()
            self._fill(request)
            work.finish(self._refusal(request))
            return
        try:
            error, later = self._attempted(request, act, call)
            while broken := isinstance(error, LinkError):
                if not step.again():
                    error = self._ended(error)
                    break
                error, later = self._attempted(request, act, call)
            if isinstance(error, Exception) or broken:
                self.log.note_unrepeatable()
            if broken and request.emptied:
                empty(request.outputs)  # part of an object may have arrived
            elif broken:
                self._fill(request)
            if not later:
                work.finish(error)
        finally:
            step.leave()

    def _refusal(self, request: OutputRequest) -> RuntimeError | None:
        """What ``wait`` raises for an operation that was not begun. The results of a void step are
        dropped by the vote, but those of a rank that has failed might be saved."""
        if not request.outputs or self.fabric.step.state is not StepState.FAILED:
            return None
        return RuntimeError(
            f"{request.op} has no result: the script of this rank has left a training step with an "
            "error, and no other rank takes part"
        )

    def _fill(self, request: OutputRequest) -> None:
        """Fill whole numbers that did not arrive with those of this rank. A script may take sizes
        from them, and by what is in new memory the rest of a void step could allocate gigabytes."""
        if _may_be_sizes(request.outputs):
            self._simulate(Neutral(), request, None)

    def _ended(self, error: LinkError) -> LinkError | None:
        """What ``wait`` raises for an operation that broke with ``error`` in a void step."""
        if (sandbox := self.fabric.sandboxed) is not None:
            sandbox.source.spoil()
        return self.judged(error)

    def _attempted(
        self,
        request: OutputRequest,
        act: Callable[[EpochView], bool | None],
        call: CollectiveCall | None,
    ) -> tuple[Exception | None, bool]:
        """Run an operation once; returns its error, and whether another thread completes it."""
        sandbox, standing = self.fabric.sandboxed, self.fabric.standing
        try:
            if standing is not None:
                if standing.shrunk and call is None:
                    raise Inelastic(f"its script calls {request.op}")
                return None, act(standing) is False
            if sandbox is None:
                return RuntimeError("the fabric has neither a rank nor a sandbox"), False
            self._simulate(sandbox.source, request, call)
        except LinkError as e:
            if standing is not None:
                standing.blame(e)
            return e, False
        except Exception as e:  # an error in the call: the other ranks must not wait
            if isinstance(e, Inelastic):
                self.fabric.passes.refuse(e.why)
            if standing is not None:
                standing.poison(f"rank {standing.rank} failed in {request.op}: {e!r}")
            return e, False
        return None, False

    def _simulate(
        self, source: OutputSource, request: OutputRequest, call: CollectiveCall | None
    ) -> None:
        name = self.view.name + request.channel
        with device.after(request.queued):
            if call is not None:
                self.log.begin(call, request.inputs)
            with writing():
                source.outputs(request.op, name, request.outputs, request.inputs)
            if request.objects and isinstance(source, Neutral):
                empty(request.outputs)
        if call is not None:
            if (rank := self.fabric.rank) is not None:
                self.log.received(rank, self.view.ranks)
            self.log.end()

    # --- finishing a step after a loss ---------------------------------------------------------

    def go_back(self, again: Rerun) -> None:
        """Run the complete operations of ``again`` once more, for ranks without them.

        No operation of the group may run. They come before any other operation.
        """
        self.log.go_back(again)
        if self.log.to_repeat:
            self.lane.run(self._catch_up_alone, inline=False)

    def _catch_up_alone(self) -> None:
        """Catch up if no operation of this group is waiting, which would do it."""
        step, standing = self.fabric.step, self.fabric.standing
        if standing is None or not step.enter():
            return
        try:
            self._catch_up(standing)
        except LinkError as error:
            standing.blame(error)
        except Exception as error:
            standing.poison(
                f"rank {standing.rank} failed in an operation that it repeats: {error!r}"
            )
        finally:
            step.leave()

    def _catch_up(self, standing: EpochView) -> None:
        to_repeat = self.log.to_repeat
        while to_repeat:
            if not to_repeat[0].repeat_for_others(self._op(to_repeat[0].call, standing)):
                # The standby computes other inputs than its rank did, or the script has changed
                # the result: this rank would go on with other bits than those that lacked it.
                raise LinkError(f"rank {standing.rank} cannot repeat an operation bit for bit")
            if to_repeat:  # a new step may have begun
                to_repeat.popleft()

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
        if standing.shrunk:
            return self._share(call, staged, standing)
        op = self._op(call, standing)
        with staged as (outputs, inputs):
            body = self.log.begin(call, inputs)
            tap, given = self.fabric.tap, ""
            if tap is not None and not self.log.repeats:
                given = tap.given(call.kind.name.lower(), self.view.name, inputs)
            with _numbers_kept(call, outputs):
                body(op, outputs, inputs)
        self.log.end()
        self.fabric.counters.bytes += sum(t.nbytes for t in outputs)
        self.mirror(call.kind.name.lower(), staged.outputs, given=given)

    def _share(self, call: CollectiveCall, staged: HostCopies, standing: EpochView) -> None:
        """Run an operation in an epoch in which workers have adopted ranks."""
        passes, name = self.fabric.passes, call.kind.name.lower()
        if why := obstacle(call.kind, in_step=passes.open, objects=call.objects):
            raise Inelastic(why)
        if standing.poisoned:
            raise LinkError(standing.reason)
        tap = self.fabric.tap
        with staged as (outputs, inputs):
            kept = self.pass_log.next(call, outputs)
            given = ""
            if tap is not None and passes.acting == standing.rank:
                given = tap.given(name, self.view.name, inputs)
            if kept is not None:
                given = kept.given = kept.given or given
                if not self.pass_log.goes_out(call, kept, outputs):
                    return
            self._body(call, standing)(self._op(call, standing), outputs, inputs)
            if kept is not None and call.kind is FrameKind.BROADCAST:
                kept.keep(outputs)
        self.fabric.counters.bytes += sum(t.nbytes for t in outputs)
        self.mirror(name, staged.outputs, given=given)

    def _body(self, call: CollectiveCall, standing: EpochView) -> Body:
        """The work of ``call``, whose root may be adopted."""
        if call.kind is not FrameKind.BROADCAST:
            return call.body
        membership, root = standing.membership, self.view.ranks[call.root]
        crew = membership.crew(self.view.ranks)
        return on_tensors.broadcast(crew.index(membership.adopted.get(root, root)))

    def _op(self, call: CollectiveCall, standing: EpochView) -> Op:
        if standing.poisoned:
            raise LinkError(standing.reason)
        ranks = standing.membership.crew(self.view.ranks) if standing.shrunk else self.view.ranks
        return Op(
            ranks.index(standing.rank),
            len(ranks),
            self._header(call, standing),
            lambda place: self._link(standing, ranks[place]),
            self._scratch,
            len(self.view.ranks),
        )

    def _header(self, call: CollectiveCall, standing: EpochView) -> FrameHeader:
        # A joiner has not counted along: numbering restarts with each epoch.
        self.seq = self.seq + 1 if self._standing is standing else 0
        self._standing = standing
        return FrameHeader(standing.epoch, self.seq, call.kind, call.dtype, call.root, call.detail)

    def _link(self, standing: EpochView, rank: int) -> Link:
        return standing.link(self.view.name, rank, patience=self.patience)


def _may_be_sizes(outputs: Sequence[Tensor]) -> bool:
    """Whether they are whole numbers, and few."""
    whole = not any(output.is_floating_point() for output in outputs)
    return whole and sum(output.nbytes for output in outputs) <= INDEX_BYTES


@contextmanager
def _numbers_kept(call: CollectiveCall, outputs: Sequence[Tensor]) -> Iterator[None]:
    """Whole numbers that a broadcast is to replace stay as they were if it breaks.

    A DDP model that is not registered takes the numbers and sizes of its new buckets from two of
    them. Part of another message there makes it allocate gigabytes. ``outputs`` are in host memory.
    """
    kept = (
        call.kind is FrameKind.BROADCAST  # first, since each collective comes here
        and _may_be_sizes(outputs)
    )
    copies = [output.clone() for output in outputs] if kept else []
    try:
        yield
    except LinkError:
        for output, before in zip(outputs, copies, strict=False):
            output.copy_(before)
        raise
