"""Operations that inner groups run: what is asked of them, and how a rank waits for their end."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.fabric.circle import Circle, circle
from tests.fabric.fake_nccl import Cluster, FakeKind
from tests.fabric.test_passing import SOON_S, passing
from tests.trainer.wire import Facts
from tmd.core.values.model import Membership
from tmd.fabric import Fabric, device
from tmd.fabric.generations.generations import GenerationLimits, Generations
from tmd.fabric.generations.passing import PassingGroup
from tmd.fabric.wait_timer import WaitTimer
from tmd.fabric.work import Work
from tmd.torch_private.c10d import Work as TorchWork

pytestmark = pytest.mark.timeout(120)


class LateDevice(device.Cuda):
    """A device that has not come to what the script has queued, until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.awaited = threading.Event()

    def queued(self, tensors: Iterable[Tensor]) -> device.Queued:
        return cast("device.Queued", self)

    @property
    def done(self) -> bool:
        return self.released.is_set()

    def wait(self) -> None:
        self.awaited.set()
        assert self.released.wait(SOON_S)

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()


class AfterAnother(LateDevice):
    """A device whose second operation needs the result of the first, as with FSDP2."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def queued(self, tensors: Iterable[Tensor]) -> device.Queued:
        self.calls += 1
        return device.NOTHING if self.calls == 1 else super().queued(tensors)


class Modelled:
    """Two ranks whose groups pass everything to a model of NCCL."""

    def __init__(self, c: Circle, **limits: float) -> None:
        self.circle, self.cluster = c, Cluster()
        self.hung: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
        for fabric in c.fabrics:
            kind = FakeKind(self.cluster, fabric.worker)
            within = GenerationLimits(**limits)
            fabric.pass_to(Generations(kind, limits=within, on_hung=self.hung.put))
            fabric.generations.enter(c.membership)
        self.groups = {f.worker: PassingGroup(f, "0", range(2)) for f in c.fabrics}
        c.each(lambda f: f.generations.of(self.groups[f.worker].view))

    def allreduce(self, rank: int, tensor: Tensor | None = None) -> TorchWork:
        given = torch.ones(2) if tensor is None else tensor
        return self.groups[self.circle.fabrics[rank].worker].allreduce([given])


@contextmanager
def modelled(**options: float) -> Iterator[Modelled]:
    with circle(2) as c:
        made, before = Modelled(c, **options), device.current()
        try:
            yield made
        finally:
            device.use(before)
            made.cluster.end()


class Handed:
    """A backend that holds nothing but the work that it returned."""

    def allreduce(self, tensors: list[Tensor], opts: object = None) -> Work:
        self.work = Work([], WaitTimer())
        return self.work


def test_the_tensors_of_a_running_operation_are_kept() -> None:
    """A script may free them at once, and a device would then write into memory of others."""
    with passing() as p:
        fabric = p.circle.fabrics[0]
        backend = p.circle.each(p.inner)[0]._backend = Handed()
        tensor = torch.ones(2)
        kept = weakref.ref(tensor)
        p.groups[fabric.worker].allreduce([tensor])
        del tensor
        gc.collect()
        assert kept() is not None
        backend.work.finish()
        fabric.settle()
        gc.collect()
        assert kept() is None


class Locked(Work):
    """An operation of which nothing can be asked during an abort, as with NCCL."""

    def __init__(self, mutex: threading.Lock) -> None:
        super().__init__([], WaitTimer())
        self._mutex = mutex

    def is_completed(self) -> bool:
        with self._mutex:
            return super().is_completed()


class Mutex:
    """A backend with a lock that an abort holds."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def allreduce(self, tensors: list[Tensor], opts: object = None) -> Locked:
        return Locked(self.lock)


def test_nothing_is_asked_of_an_operation_while_its_group_is_aborted() -> None:
    """NCCL would answer after the abort only, and no other thread would run meanwhile."""
    with passing() as p:
        fabric = p.circle.fabrics[0]
        group = p.groups[fabric.worker]
        inner, *_ = p.circle.each(p.inner)
        backend = inner._backend = Mutex()
        inside, released = threading.Event(), threading.Event()

        def abort() -> None:
            with backend.lock:
                inside.set()
                released.wait()

        inner.abort = abort
        work = group.allreduce([torch.ones(2)])
        asked: queue.SimpleQueue[object] = queue.SimpleQueue()

        def ask() -> None:
            group.allreduce([torch.ones(2)])
            asked.put((fabric.waiting, fabric.quiet))

        try:
            fabric.poison("a rank is lost")
            assert inside.wait(SOON_S)
            threading.Thread(target=ask, daemon=True).start()
            assert asked.get(timeout=SOON_S) == (False, False)
        finally:
            released.set()
            work.finish()


def test_an_operation_that_ends_with_an_error_poisons_the_epoch() -> None:
    """NCCL completes it, and its wait raises nothing. Its result is undefined."""

    class Silent(Work):
        def wait(self, timeout: timedelta = timedelta(0)) -> bool:
            return True

    class Failing:
        def allreduce(self, tensors: list[Tensor], opts: object = None) -> Work:
            work = Silent(tensors, WaitTimer())
            work.finish(dist.DistBackendError("remote error"))
            return work

    def settled(act: Callable[[Fabric, PassingGroup], None]) -> str:
        with passing() as p:
            fabric = p.circle.fabrics[0]
            p.circle.each(p.inner)[0]._backend = Failing()
            group = p.groups[fabric.worker]
            group.allreduce([torch.ones(2)])
            act(fabric, group)
            return fabric.poison_reason

    assert "remote error" in settled(lambda fabric, _: fabric.settle())
    assert "remote error" in settled(lambda _, group: group.allreduce([torch.ones(2)]))


def test_a_device_that_is_stuck_after_an_abort_is_reported() -> None:
    """The abort has ended, and nothing else would notice."""
    stuck = LateDevice()
    with modelled(settle_s=0.01) as m:
        fabric = m.circle.fabrics[0]
        device.use(stuck)
        m.allreduce(0)
        fabric.poison("a rank is lost")
        assert fabric.generations.await_aborts(SOON_S) == ()
        settling = threading.Thread(target=fabric.settle)
        settling.start()
        try:
            assert m.hung.get(timeout=SOON_S) == ("0",)
        finally:
            stuck.released.set()
            settling.join(SOON_S)


def test_a_drain_waits_no_longer_than_it_may() -> None:
    with modelled() as m:
        m.allreduce(0)
        assert not m.groups["w0"].drain(0.01)
        m.allreduce(1)
        assert m.groups["w0"].drain(SOON_S)


def test_a_wait_inside_an_operation_that_a_later_one_needs_is_for_others() -> None:
    """As with FSDP2, where the device comes to the last operation only after the first."""
    with modelled() as m:
        needs = AfterAnother()
        device.use(needs)
        fabric = m.circle.fabrics[0]
        m.allreduce(0)
        m.allreduce(0)
        settling = threading.Thread(target=fabric.settle)
        settling.start()
        Facts().until(lambda: fabric.waiting)
        assert not needs.awaited.is_set()
        m.allreduce(1)
        assert needs.awaited.wait(SOON_S)
        needs.released.set()
        m.allreduce(1)
        settling.join(SOON_S)
        assert not settling.is_alive()


def test_a_rank_whose_device_is_late_does_not_wait_for_others() -> None:
    """It called the operation long before its device comes to it; the stall detector must name it,
    and not the ranks that wait for it."""
    with modelled() as m:
        late = LateDevice()
        device.use(late)
        first = m.circle.fabrics[0]
        m.allreduce(0)
        settling = threading.Thread(target=first.settle)
        settling.start()
        assert late.awaited.wait(SOON_S)
        assert not first.waiting
        late.released.set()
        Facts().until(lambda: first.waiting)
        m.allreduce(1)
        settling.join(SOON_S)
        assert not settling.is_alive()
        assert not first.waiting


def test_work_that_runs_when_a_member_is_lost_completes() -> None:
    """On a model of NCCL, whose calls return at once and hang without a peer."""
    with modelled() as m:
        survivor, lost = m.circle.fabrics
        m.cluster.lose(lost.worker)
        work = m.allreduce(0)
        assert not work.is_completed()
        assert survivor.waiting
        survivor.poison("a rank is lost")
        survivor.settle()
        assert work.wait()
        assert m.allreduce(0).wait()


def test_an_orderly_end_aborts_no_group_in_which_nothing_runs() -> None:
    """Others may still need what they have called."""
    with modelled() as m:
        m.allreduce(0)
        m.allreduce(1)
        ends = m.circle.fabrics[0]
        ends.close()
        assert m.cluster.aborts == 0
        assert m.cluster.open == 1


def test_an_end_after_a_loss_aborts() -> None:
    """What runs would never end."""
    with modelled() as m:
        m.allreduce(0)
        m.circle.fabrics[0].close(orderly=False)
        assert m.cluster.aborts == 1


def test_a_switch_that_fails_poisons_and_raises_nothing() -> None:
    """The vote of the next step drops it, and the job recovers."""
    with modelled() as m:
        fabric = m.circle.fabrics[0]
        fabric.switch(Membership(epoch=2, members=m.circle.membership.members), 0)
        assert "nothing is prepared" in fabric.poison_reason
        assert m.allreduce(0).wait()
