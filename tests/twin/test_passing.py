"""A call that an inner group carries is ordered with the streams of all who use its result.

The inner group here queues its work as NCCL does: a call that the caller waits for runs in the
caller's stream and returns nothing, any other runs in a stream of the inner group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.fabric.circle import circle, sync
from tests.twin.device import Twin
from tmd.fabric import Fabric
from tmd.fabric.collectives import on_tensors
from tmd.fabric.device import Queued
from tmd.fabric.frame import FrameKind
from tmd.fabric.generations.generations import Generations
from tmd.fabric.generations.inner import GroupRequest
from tmd.fabric.generations.passing import PassingGroup
from tmd.fabric.kept_calls import CollectiveCall
from tmd.fabric.step_log import StepLog
from tmd.torch_private.c10d import Work as TorchWork

INNER = "inner group"


class StreamWork(TorchWork):
    """A handle of NCCL: its wait only lets the current stream come after the work."""

    def __init__(self, queued: Queued) -> None:
        super().__init__()
        self._queued = queued

    def wait(self, *_: object) -> bool:
        self._queued.precede()
        return True

    def is_completed(self) -> bool:
        return True


class StreamInner:
    """The inner group of one rank on a twin."""

    def __init__(self, twin: Twin) -> None:
        self._twin = twin

    @property
    def backend(self) -> StreamInner:
        return self

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> StreamWork | None:
        """Change the tensor, as a sum does."""
        (own,) = tensors
        if not opts.asyncOp:
            own += 1
            return None
        before = self._twin.queued(tensors)
        with self._twin.stream(INNER):
            before.precede()
            own += 1
            return StreamWork(self._twin.queued(tensors))

    def abort(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing is held."""


class StreamKind:
    """Builds inner groups for tensors of a twin."""

    def __init__(self, twin: Twin) -> None:
        self._twin = twin

    def takes(self, tensor: Tensor) -> bool:
        return self._twin.holds(tensor)

    def build(self, request: GroupRequest) -> StreamInner:
        return StreamInner(self._twin)

    def end(self, within_s: float) -> tuple[str, ...]:
        return ()


class Copies:
    """A tap that queues a copy of each output on the device, and waits for nothing."""

    follows = True

    def __init__(self) -> None:
        self.taken: list[Tensor] = []

    def given(self, op: str, group: str, inputs: Sequence[Tensor]) -> str:
        return ""

    def output(self, op: str, group: str, outputs: Sequence[Tensor], given: str = "") -> None:
        self.taken += [each.clone() for each in outputs]

    def voted(self, result: Sequence[int]) -> None:
        """No vote is held."""

    def shifted(self, offset: int, payload: bytes) -> None:
        """Nothing is shifted."""


@contextmanager
def passing(twin: Twin) -> Iterator[tuple[Fabric, PassingGroup]]:
    """A rank that trains in a stream of its own, and its group."""
    with twin.installed(), circle(1) as c:
        (fabric,) = c.fabrics
        fabric.pass_to(Generations(StreamKind(twin)))
        group = PassingGroup(fabric, "0", range(1))
        fabric.generations.enter(c.membership)
        with twin.training(), twin.stream("training"):
            yield fabric, group


def waited(group: PassingGroup, own: Tensor) -> None:
    """A call that its caller waits for, in the caller's own stream."""
    group.allreduce([own], sync()).wait()


def beside(group: PassingGroup, own: Tensor) -> None:
    """A call that runs beside what its caller queues until it waits."""
    group.allreduce([own], dist.AllreduceOptions()).wait()


@pytest.mark.parametrize("call", [waited, beside])
def test_a_copy_for_a_shadow_is_ordered_with_the_call_and_with_the_script(
    call: Callable[[PassingGroup, Tensor], None],
) -> None:
    """It comes after the result, and the script may change the result as soon as it has it."""
    twin, tap = Twin(), Copies()
    with passing(twin) as (fabric, group):
        fabric.tap = tap
        own = torch.ones(4)
        before = twin.recorder.ordered
        call(group, own)
        own.zero_()

        assert twin.recorder.races == []
        assert not fabric.poisoned, fabric.poison_reason
        assert twin.recorder.ordered > before, "nothing had to be ordered"
    assert [each.tolist() for each in tap.taken] == [[2.0] * 4]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("opts", [sync, dist.AllreduceOptions])
def test_a_stream_that_waits_for_a_call_comes_after_it(
    opts: Callable[[], dist.AllreduceOptions], waits: bool
) -> None:
    """Also one in which the script did not call it. Without the wait there is a race."""
    twin = Twin()
    with passing(twin) as (_, group):
        own = torch.ones(4)
        work = group.allreduce([own], opts())
        with twin.stream("of a reader"):
            if waits:
                work.wait()
            own.clone()

    assert (twin.recorder.races == []) is waits


@pytest.mark.parametrize("settles", [True, False])
@pytest.mark.parametrize("opts", [sync, dist.AllreduceOptions])
def test_a_vote_comes_after_all_that_the_inner_group_runs(
    opts: Callable[[], dist.AllreduceOptions], settles: bool
) -> None:
    """Any thread may read the state then, in any stream."""
    twin = Twin()
    with passing(twin) as (fabric, group):
        own = torch.ones(4)
        group.allreduce([own], opts())
        if settles:
            fabric.settle()
        with twin.stream("of a reader"):
            own.clone()

    assert (twin.recorder.races == []) is settles


@pytest.mark.parametrize("there", ["inputs", "outputs"])
def test_an_operation_on_a_device_is_not_kept_to_be_run_again(there: str) -> None:
    """It runs on copies in host memory. Whether its outputs were changed is asked of the script's
    own tensors, which the host cannot read."""
    twin = Twin()
    with twin.installed():
        with twin.training():
            made = [torch.ones(4)]
        host = [torch.ones(4)]
        inputs, outputs = (made, host) if there == "inputs" else (host, made)
        log = StepLog()
        log.restart(keeps=True)
        log.begin(CollectiveCall(FrameKind.ALLREDUCE, on_tensors.barrier, outputs, inputs), host)

        assert log.progress.kept == -1
