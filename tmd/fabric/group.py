"""The process group that torch gets: collectives, messages and coalescing."""

from __future__ import annotations

from contextlib import ExitStack
from math import inf

import torch
from torch import Tensor

from tmd.core.values.errors import LinkError
from tmd.fabric import coalescing
from tmd.fabric.collective_group import CollectiveGroup, TensorList
from tmd.fabric.epoch_view import EpochView
from tmd.fabric.frame import FrameHeader, FrameKind
from tmd.fabric.inbox import ANY, PostedReceive
from tmd.fabric.memory import view
from tmd.fabric.objects import empty, under_way
from tmd.fabric.reduction import dtype_code
from tmd.fabric.runner import OutputRequest
from tmd.fabric.staging import HostCopies
from tmd.fabric.untraced import untraced
from tmd.fabric.work import Joint, Work

TAGS = 1 << 31
"""Number of tags that a message can have, as in MPI and Gloo."""


class Group(CollectiveGroup):
    """A process group whose members can be replaced."""

    @untraced
    def send(self, tensors: TensorList, dstRank: int, tag: int = 0) -> Work:
        """Its work completes when the tensor may be changed, received or not."""
        tensor = _single(tensors)
        self._runner.log.note_unrepeatable()
        self._need_rank(dstRank)
        self._fabric.passes.saw(FrameKind.MESSAGE)
        _check_tag(tag)
        work = Work(tensors, self._fabric.blocked)
        staged = HostCopies([], tensors, self._fabric.blocked)

        def act(standing: EpochView) -> None:
            if standing.poisoned:
                raise LinkError(standing.reason)
            code = dtype_code(tensor.dtype)
            header = FrameHeader(standing.epoch, 0, FrameKind.MESSAGE, code, 0, tag)
            with staged as (_, inputs):
                patience = self._runner.patience
                self._mailbox.send(standing, dstRank, header, view(inputs[0]), patience)

        def task() -> None:
            self._runner.guarded(work, OutputRequest("send", (), tensors, staged.queued), act)

        # In the sandbox the operations of a group begin in the script's order.
        sandboxed = self._fabric.standing is None
        lane = self._runner.lane if sandboxed else self._mailbox.outbox(dstRank)
        lane.run(task, inline=False)
        return self._begun(work)

    @untraced
    def recv(self, tensors: TensorList, srcRank: int, tag: int = 0) -> Work:
        self._need_rank(srcRank)
        return self._receive(tensors, srcRank, tag)

    @untraced
    def recv_anysource(self, tensors: TensorList, tag: int = 0) -> Work:
        return self._receive(tensors, ANY, tag)

    def _receive(self, tensors: TensorList, source: int, tag: int) -> Work:
        _single(tensors)
        _check_tag(tag)
        # At the call: queued behind a collective, it may run only after a loss was decided on.
        self._runner.log.note_unrepeatable()
        self._fabric.passes.saw(FrameKind.MESSAGE)
        work = Work(tensors, self._fabric.blocked)
        work.source = max(source, 0)
        # Only messages of one sender and tag are sure to match receives in order. So receives are
        # mirrored and replayed in order for each sender and tag.
        kind = "recv" if source != ANY else "recv_anysource"
        objects = under_way()
        if objects:
            empty(tensors)
        staged = HostCopies(tensors, (), self._fabric.blocked)
        request = OutputRequest(
            kind, tensors, (), staged.queued, f"/{source}/{tag}", objects, objects
        )
        if self._fabric.standing is None:
            task = lambda: self._runner.guarded(work, request, _came_late)  # noqa: E731
            self._runner.lane.run(task, inline=False)
        else:
            self._runner.guarded(
                work,
                request,
                lambda standing: self._post(standing, request, staged, source, tag, work),
            )
        return self._begun(work)

    def _post(
        self,
        standing: EpochView,
        request: OutputRequest,
        staged: HostCopies,
        source: int,
        tag: int,
        work: Work,
    ) -> bool:
        (host,), _ = staged.__enter__()
        awaited = ExitStack()

        def deliver(error: LinkError | None, sender: int) -> None:
            failure: Exception | None = self._runner.judged(error)
            try:
                if error is None:
                    staged.__exit__(None, None, None)
                    work.source = sender
                    self._runner.mirror(request.op, [host], request.channel)
                elif request.emptied:
                    empty(request.outputs)  # part of an object may have arrived
            except Exception as e:  # such as no memory for the copy of a shadow
                wanted.standing.poison(f"rank {standing.rank} failed in {request.op}: {e!r}")
                failure = e
            finally:
                awaited.close()
                work.finish(failure)

        code, patience = dtype_code(host.dtype), self._runner.patience or inf
        wanted = PostedReceive(source, tag, standing, code, view(host), deliver, patience)
        awaited.enter_context(self._awaited)
        try:
            self._mailbox.post(wanted)
        except BaseException:
            # A shadow cannot follow a rank that awaits a message, so stop counting this one. It
            # may still be delivered; closing twice is harmless.
            awaited.close()
            raise
        return False

    @untraced
    def _start_coalescing(self, device: torch.device) -> None:
        """Begin to collect the operations that _end_coalescing joins. They start at once."""
        coalescing.begin(self)

    @untraced
    def _end_coalescing(self, device: torch.device) -> Joint:
        """Its work completes when all operations since _start_coalescing have completed. Ranks that
        called none need not take part."""
        return Joint(coalescing.end(self))

    def _need_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size():
            raise ValueError(f"rank {rank} is not in a group of {self.size()}")


def _came_late(standing: EpochView) -> None:
    raise LinkError(f"a receive was called before this worker became rank {standing.rank}")


def _check_tag(tag: int) -> None:
    if not 0 <= tag < TAGS:
        raise ValueError(f"the tag of a message is a number from 0 to {TAGS - 1}, got {tag}")


def _single(tensors: TensorList) -> Tensor:
    if len(tensors) != 1:
        raise ValueError(f"a message is one tensor, got {len(tensors)}")
    return tensors[0]
