"""A group passes its collectives to the inner group of the live generation, and to no other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FunctionType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.fabric.circle import Circle, at_once, circle, member, sync
from tests.fabric.entries import OLD
from tests.fabric.test_sandbox import Recorder
from tmd.core.values.model import Membership
from tmd.fabric import Fabric
from tmd.fabric.generations.generations import Generations
from tmd.fabric.generations.gloo import GlooInner, GlooKind
from tmd.fabric.generations.passing import PASSED, PassingGroup
from tmd.fabric.generations.states import GenerationState
from tmd.fabric.objects import NONE
from tmd.fabric.work import Work

pytestmark = pytest.mark.timeout(120)

SIZE = 3
SOON_S = 20.0


class Passing:
    """Three ranks whose groups pass tensors of floats to Gloo."""

    def __init__(self, c: Circle) -> None:
        self.circle = c
        self.groups: dict[str, PassingGroup] = {}
        for rank, fabric in enumerate(c.fabrics):
            self.add(fabric)
            fabric.generations.enter(c.membership)
            assert fabric.rank == rank

    def add(self, fabric: Fabric) -> None:
        fabric.pass_to(Generations(GlooKind(fabric, Tensor.is_floating_point)))
        self.groups[fabric.worker] = PassingGroup(fabric, "0", range(SIZE))

    def build(self, membership: Membership, fabrics: Sequence[Fabric]) -> None:
        """Build the next epoch beside the present one, whose rank r is ``fabrics[r]``."""
        done: queue.SimpleQueue[str] = queue.SimpleQueue()
        for rank, fabric in enumerate(fabrics):
            fabric.generations.prepare(fabric.groups_of(rank), membership, done.put)
        assert [done.get(timeout=SOON_S) for _ in fabrics] == [""] * len(fabrics)

    def prepare_a_joiner(
        self, also: Callable[[Fabric], None] = lambda fabric: None
    ) -> tuple[list[Fabric], list[Fabric], Membership]:
        """Prepare to replace the last rank, once all have used their group: the fabrics before and
        after, and the next membership. ``also``: called with each fabric before."""
        old = list(self.circle.fabrics)
        joiner = self.circle.standby("joiner", rank=SIZE - 1)
        self.add(joiner)
        for fabric in (*old, joiner):
            also(fabric)
        self.circle.each(self.inner)
        new = [*old[:-1], joiner]
        later = Membership(epoch=2, members=tuple(map(member, new)))
        self.build(later, new)
        return old, new, later

    def switch(self, old: Sequence[Fabric], new: Sequence[Fabric], later: Membership) -> None:
        """Let all switch to what :meth:`prepare_a_joiner` has prepared."""
        old[-1].switch(later, None)
        at_once([lambda f=f, r=r: f.switch(later, r) for r, f in enumerate(new)])

    def inner(self, fabric: Fabric) -> GlooInner:
        inner = fabric.generations.of(self.groups[fabric.worker].view)
        assert isinstance(inner, GlooInner)
        return inner


@contextmanager
def passing() -> Iterator[Passing]:
    with circle(SIZE) as c:
        yield Passing(c)


Collective = Callable[[PassingGroup, Tensor], list[Tensor]]


def allreduce(group: PassingGroup, own: Tensor) -> list[Tensor]:
    group.allreduce([own], sync()).wait()
    return [own]


def broadcast(group: PassingGroup, own: Tensor) -> list[Tensor]:
    opts = dist.BroadcastOptions()
    opts.rootRank = 1
    group.broadcast([own], opts).wait()
    return [own]


def allgather(group: PassingGroup, own: Tensor) -> list[Tensor]:
    found = [torch.empty_like(own) for _ in range(SIZE)]
    group.allgather([found], [own]).wait()
    return found


def allreduce_coalesced(group: PassingGroup, own: Tensor) -> list[Tensor]:
    both = [own, own + 1]
    group.allreduce_coalesced(both, dist.AllreduceCoalescedOptions()).wait()
    return both


def allgather_coalesced(group: PassingGroup, own: Tensor) -> list[Tensor]:
    found = [[torch.empty_like(own) for _ in range(2)] for _ in range(SIZE)]
    group.allgather_coalesced(found, [own, own + 1]).wait()
    return [each for mine in found for each in mine]


def reduce(group: PassingGroup, own: Tensor) -> list[Tensor]:
    opts = dist.ReduceOptions()
    opts.rootRank = 1
    group.reduce([own], opts).wait()
    return [own] if group.rank() == 1 else []


def gather(group: PassingGroup, own: Tensor) -> list[Tensor]:
    opts = dist.GatherOptions()
    opts.rootRank = 1
    found = [torch.empty_like(own) for _ in range(SIZE)] if group.rank() == 1 else []
    group.gather([found] if found else [], [own], opts).wait()
    return found


def scatter(group: PassingGroup, own: Tensor) -> list[Tensor]:
    opts = dist.ScatterOptions()
    opts.rootRank = 1
    found = torch.empty_like(own)
    given = [[own + n for n in range(SIZE)]] if group.rank() == 1 else []
    group.scatter([found], given, opts).wait()
    return [found]


def reduce_scatter(group: PassingGroup, own: Tensor) -> list[Tensor]:
    found = torch.empty_like(own)
    given = [[own + n for n in range(SIZE)]]
    group.reduce_scatter([found], given, dist.ReduceScatterOptions()).wait()
    return [found]


def alltoall(group: PassingGroup, own: Tensor) -> list[Tensor]:
    found = [torch.empty_like(own) for _ in range(SIZE)]
    group.alltoall(found, [own + n for n in range(SIZE)], dist.AllToAllOptions()).wait()
    return found


def all_gather_into(name: str) -> Collective:
    def collective(group: PassingGroup, own: Tensor) -> list[Tensor]:
        found = own.new_empty(SIZE * len(own))
        getattr(group, name)(found, own).wait()
        return [found]

    return collective


def reduce_scatter_from(name: str) -> Collective:
    def collective(group: PassingGroup, own: Tensor) -> list[Tensor]:
        found = own.new_empty(len(own) // SIZE)
        getattr(group, name)(found, own, dist.ReduceScatterOptions()).wait()
        return [found]

    return collective


def all_to_all_rows(name: str) -> Collective:
    def collective(group: PassingGroup, own: Tensor) -> list[Tensor]:
        found = torch.empty_like(own)
        getattr(group, name)(found, own, [], [], dist.AllToAllOptions()).wait()
        return [found]

    return collective


def all_gather_each(group: PassingGroup, own: Tensor) -> list[Tensor]:
    found = [own.new_empty(SIZE * len(own)) for _ in range(2)]
    group.all_gather_single_coalesced(found, [own, own + 1]).wait()
    return found


def reduce_scatter_each(group: PassingGroup, own: Tensor) -> list[Tensor]:
    found = [own.new_empty(len(own) // SIZE) for _ in range(2)]
    opts = dist.ReduceScatterOptions()
    group.reduce_scatter_single_coalesced(found, [own, own + 1], opts).wait()
    return found


PASSED_ON: dict[str, Collective] = {
    "allreduce": allreduce,
    "allreduce_coalesced": allreduce_coalesced,
    "reduce": reduce,
    "broadcast": broadcast,
    "allgather": allgather,
    "gather": gather,
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    "alltoall": alltoall,
    **{n: all_gather_into(n) for n in ("_allgather_base", "all_gather_single")},
    **{n: reduce_scatter_from(n) for n in ("_reduce_scatter_base", "reduce_scatter_single")},
    **{n: all_to_all_rows(n) for n in ("alltoall_base", "all_to_all_single")},
}
STAY: dict[str, Collective] = {
    "allgather_coalesced": allgather_coalesced,
    "all_gather_single_coalesced": all_gather_each,
    "reduce_scatter_single_coalesced": reduce_scatter_each,
}
"""Those for which a backend has no public method."""
UNKNOWN: set[str] = {"alltoall"} if OLD else set()
"""Those that Gloo does not have in this version of torch."""
COLLECTIVES = {n: act for n, act in {**PASSED_ON, **STAY}.items() if n not in UNKNOWN}


def test_every_collective_that_is_passed_on_is_tried() -> None:
    assert PASSED_ON.keys() == PASSED.keys()


@pytest.mark.parametrize("name", COLLECTIVES)
def test_both_ways_have_the_same_result(name: str) -> None:
    """Floats go to Gloo and integers to tmd's own algorithms."""
    collective = COLLECTIVES[name]
    with passing() as p:

        def run(fabric: Fabric, dtype: torch.dtype) -> list[Tensor]:
            rank = p.circle.fabrics.index(fabric)
            own = (torch.arange(6) + 10 * rank).to(dtype)
            return [each.to(torch.int64) for each in collective(p.groups[fabric.worker], own)]

        before = [fabric.counters.bytes for fabric in p.circle.fabrics]
        by_gloo = p.circle.each(lambda fabric: run(fabric, torch.float32))
        used = [fabric.counters.bytes for fabric in p.circle.fabrics] != before
        assert used is (name in STAY)
        before = [fabric.counters.bytes for fabric in p.circle.fabrics]
        by_tmd = p.circle.each(lambda fabric: run(fabric, torch.int64))
        assert [fabric.counters.bytes for fabric in p.circle.fabrics] != before

        for ours, theirs in zip(by_tmd, by_gloo, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_ddp_goes_on_in_the_next_generation() -> None:
    """It was built while the previous one trained, and one member is another worker."""
    with passing() as p:
        old = list(p.circle.fabrics)
        joiner = p.circle.standby("joiner", rank=2)
        p.add(joiner)
        members = (*(member(f) for f in old[:2]), member(joiner))
        later = Membership(epoch=2, members=members)

        def model_of(fabric: Fabric) -> DistributedDataParallel:
            torch.manual_seed(0)
            return DistributedDataParallel(nn.Linear(4, 4), process_group=p.groups[fabric.worker])

        models = dict(
            zip([f.worker for f in old], p.circle.each(model_of), strict=True),
            joiner=model_of(joiner),  # in the sandbox: it communicates with no one
        )

        def gradient(fabric: Fabric, rank: int) -> Tensor:
            model = models[fabric.worker]
            model.zero_grad()
            model(torch.full((1, 4), float(rank + 1))).sum().backward()
            grad = model.module.weight.grad
            assert isinstance(grad, Tensor)
            return grad.clone()

        expected = torch.full((4, 4), 2.0)  # the mean of the ranks' inputs
        new = [*old[:2], joiner]
        p.build(later, new)
        for step in range(2):
            found = at_once([lambda f=f, r=r: gradient(f, r) for r, f in enumerate(old)])
            assert all(torch.equal(each, expected) for each in found), f"step {step}"
            gradient(joiner, 2)  # DDP settles the order of its gradients in the first step

        inner = p.inner(old[0])
        old[2].switch(later, None)
        at_once([lambda f=f, r=r: f.switch(later, r) for r, f in enumerate(new)])
        assert p.inner(old[0]) is not inner
        found = at_once([lambda f=f, r=r: gradient(f, r) for r, f in enumerate(new)])
        assert all(torch.equal(each, expected) for each in found)
        old[0].generations.reap()
        assert inner.closed


def test_a_group_that_no_member_has_used_is_not_built() -> None:
    """It would only take memory of the device. Its first use builds it, on all members."""
    with passing() as p:
        idle: dict[str, PassingGroup] = {}

        def also(fabric: Fabric) -> None:
            idle[fabric.worker] = PassingGroup(fabric, "1", range(SIZE))

        old, new, later = p.prepare_a_joiner(also)
        p.switch(old, new, later)
        built = [f.generations.live(name) for f in new for name in ("0", "1")]
        assert [g is not None and g.unneeded for g in built] == [False, True] * 3

        found = at_once([lambda f=f: allreduce(idle[f.worker], torch.ones(2)) for f in new])
        assert all(torch.equal(own, torch.full((2,), 3.0)) for (own,) in found)
        again = [f.generations.live("1") for f in new]
        assert [g is not None and (g.unneeded, g.round) for g in again] == [(False, 1)] * 3


def test_a_group_that_is_first_used_after_the_build_is_built_again_after_the_switch() -> None:
    """The next epoch was prepared without it, and one of its members has left."""
    with passing() as p:
        old, new, later = p.prepare_a_joiner()
        late = {f.worker: PassingGroup(f, "1", range(SIZE)) for f in (*old, new[2])}
        gone = {f.worker: PassingGroup(f, "2", range(2)) for f in old[:2]}
        at_once([lambda f=f: allreduce(late[f.worker], torch.ones(2)) for f in old])
        at_once([lambda f=f: allreduce(gone[f.worker], torch.ones(2)) for f in old[:2]])
        kept = old[0].generations.live("2")
        p.switch(old, new, later)
        found = at_once([lambda f=f: allreduce(late[f.worker], torch.ones(2)) for f in new])

        assert all(torch.equal(own, torch.full((2,), 3.0)) for (own,) in found)
        assert kept is not None
        assert old[0].generations.live("2") is kept  # its members are the same


def test_a_group_that_is_destroyed_after_the_build_is_not_used_after_the_switch() -> None:
    with passing() as p:
        old, new, later = p.prepare_a_joiner()
        for fabric in new:
            fabric.generations.destroy_group("0")
        p.switch(old, new, later)

        assert [f.generations.live("0") for f in new] == [None] * SIZE


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_shadow_gets_what_an_inner_group_computes(name: str) -> None:
    """The same frames as from tmd's own algorithms, before the script can change the outputs."""
    with passing() as p:
        taps = {fabric: Recorder() for fabric in p.circle.fabrics}
        for fabric, tap in taps.items():
            fabric.tap = tap

        def run(fabric: Fabric, dtype: torch.dtype) -> None:
            own = (torch.arange(6) + 10 * p.circle.fabrics.index(fabric)).to(dtype)
            for out in COLLECTIVES[name](p.groups[fabric.worker], own):
                out.zero_()

        p.circle.each(lambda fabric: run(fabric, torch.float32))
        by_gloo = {fabric: (tap.put_in[:], tap.tape[:]) for fabric, tap in taps.items()}
        for tap in taps.values():
            tap.put_in.clear()
            tap.tape.clear()
        p.circle.each(lambda fabric: run(fabric, torch.int64))

        for fabric, tap in taps.items():
            if name == "reduce" and fabric.rank != 1:
                continue  # only the root's output is defined
            ours = [plain(tap.put_in), plain(tap.tape)]
            assert [plain(each) for each in by_gloo[fabric]] == ours
            assert ours[1], "it mirrors something"


class Pairs(Recorder):
    """What was passed on with each output."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[str, float]] = []

    def output(self, op: str, group: str, outputs: Sequence[Tensor], given: str = "") -> None:
        self.pairs.append((given, float(outputs[0][0])))


def test_an_output_is_passed_on_with_the_digest_of_its_own_inputs() -> None:
    """Several operations run at once, as the buckets of DDP do."""
    with passing() as p:
        tap = Pairs()
        p.circle.fabrics[0].tap = tap

        def run(fabric: Fabric) -> None:
            works = [
                p.groups[fabric.worker].allreduce([torch.full((9,), float(n))]) for n in (1, 2)
            ]
            for work in works:
                work.wait()

        p.circle.each(run)
        assert tap.pairs == [("1", 3.0), ("2", 6.0)]


class Synchronous:
    """A backend whose synchronous calls return nothing, as those of NCCL do."""

    def allreduce(self, tensors: list[Tensor], opts: object = None) -> None:
        tensors[0].fill_(7.0)


@pytest.mark.parametrize("followed", [False, True])
def test_a_call_without_a_handle_has_its_result(followed: bool) -> None:
    """It runs in the caller's own stream. A shadow gets the result, too."""
    with passing() as p:
        fabric = p.circle.fabrics[0]
        p.circle.each(p.inner)[0]._backend = Synchronous()
        tap = Pairs()
        fabric.tap = tap if followed else None
        (found,) = allreduce(p.groups[fabric.worker], torch.ones(2))
        fabric.settle()
        assert found.tolist() == [7.0, 7.0]
        assert not fabric.poisoned
        assert not fabric.waiting
        assert tap.pairs == ([("1", 7.0)] if followed else [])


def plain(frames: list[tuple[str, str, list[Tensor]]]) -> list[object]:
    return [(op, group, [each.tolist() for each in tensors]) for op, group, tensors in frames]


def test_a_sandbox_calls_no_inner_group() -> None:
    with passing() as p:
        fabric = p.circle.fabrics[0]
        fabric.switch(p.circle.membership, None)
        (own,) = allreduce(p.groups[fabric.worker], torch.ones(2))
        assert own.tolist() == [1.0, 1.0], "the neutral result; Gloo would wait for the others"


def test_calls_of_an_aborted_generation_complete_without_a_result() -> None:
    """The step that made them is dropped; nothing may raise or wait in it."""
    with passing() as p:
        fabric = p.circle.fabrics[0]
        own = torch.ones(2)
        p.circle.each(p.inner)
        fabric.generations.lose(1)
        assert fabric.generations.await_aborts(SOON_S) == ()
        generation = fabric.generations.live("0")
        assert generation is not None
        assert generation.state is GenerationState.ABORTED
        work = p.groups[fabric.worker].allreduce([own])
        assert work.wait()
        (value,) = work.get_future().wait()
        assert value is own


def test_an_error_of_the_inner_group_reaches_the_caller() -> None:
    """While the generation is live it is a mistake of the script."""
    with passing() as p:
        p.circle.each(p.inner)
        group = p.groups[p.circle.fabrics[0].worker]
        with pytest.raises((RuntimeError, ValueError), match=r"(?i)invalid|size|must"):
            group.allgather([[torch.ones(2)] * (SIZE + 1)], [torch.ones(2)])


def test_no_call_waits_for_an_abort() -> None:
    """An abort may hang; calls of other threads complete meanwhile."""
    with passing() as p:
        fabric = p.circle.fabrics[0]
        inner, *_ = p.circle.each(p.inner)
        inside, released = threading.Event(), threading.Event()

        def abort() -> None:
            inside.set()
            released.wait()

        inner.abort = abort
        fabric.generations.lose(1)
        try:
            assert inside.wait(SOON_S)
            assert p.groups[fabric.worker].allreduce([torch.ones(2)]).wait()
            assert fabric.generations.await_aborts(0.0) == ("0",)
        finally:
            released.set()


def test_a_coalesced_block_waits_for_what_it_has_called() -> None:
    with passing() as p:
        device = torch.device("cpu")

        def run(fabric: Fabric) -> Tensor:
            group, own = p.groups[fabric.worker], torch.ones(1000)
            group._start_coalescing(device)
            group.allreduce_coalesced([own])
            group._end_coalescing(device).wait()
            return own

        assert all(torch.equal(own, torch.full((1000,), 3.0)) for own in p.circle.each(run))


class Broken:
    """A backend of an inner group in which a peer has ended."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def allreduce(self, *_: object) -> None:
        raise self._error


class Carrying:
    """A backend of an inner group that takes whatever it is given."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def _reduce_scatter_base(self, output: Tensor, given: Tensor, opts: object) -> Work:
        return self.allreduce([output.copy_(given[: len(output)])])

    def allreduce(self, tensors: list[Tensor], *_: object) -> Work:
        work = Work(tensors, self._fabric.blocked)
        work.finish()
        return work

    allreduce_coalesced = allreduce


@pytest.mark.parametrize("mode", ["alone", "followed", "sandbox"])
def test_only_the_inner_group_judges_what_it_reduces(mode: str) -> None:
    """NCCL has reductions and types that tmd's own algorithms lack. A job that uses them must not
    fail once a shadow follows, and its standby must be able to follow."""
    with passing() as p:
        fabric = p.circle.fabrics[0]
        p.circle.each(p.inner)[0]._backend = Carrying(fabric)
        group = p.groups[fabric.worker]
        if mode == "followed":
            fabric.tap = Recorder()
        if mode == "sandbox":
            fabric.switch(p.circle.membership, None)
        opts = dist.ReduceScatterOptions()
        opts.reduceOp = dist._make_nccl_premul_sum(0.25)
        mixed = [torch.ones(4), torch.ones(4, dtype=torch.bfloat16)]
        works = [
            group.reduce_scatter_single(torch.zeros(4), torch.ones(4 * SIZE), opts),
            group.allreduce([torch.ones(4).to(torch.float8_e4m3fn)]),
            group.allreduce_coalesced(mixed, dist.AllreduceCoalescedOptions()),
        ]

        assert all(work.wait() for work in works)
        assert not fabric.poisoned


def test_a_coalesced_block_of_an_inner_group_has_a_future() -> None:
    def block(fabric: Fabric) -> list[Tensor]:
        group, own = p.groups[fabric.worker], torch.ones(2)
        group._start_coalescing(own.device)
        group.allreduce([own])
        return group._end_coalescing(own.device).get_future().wait()

    with passing() as p:
        for (found,) in p.circle.each(block):
            assert found.tolist() == [float(SIZE)] * 2


def test_a_peer_that_ends_during_a_call_ends_no_survivor() -> None:
    """NCCL reports it in the call, before any link does. The vote drops the step."""
    with passing() as p:
        fabric = p.circle.fabrics[0]
        p.circle.each(p.inner)[0]._backend = Broken(dist.DistBackendError("remote process exited"))
        assert p.groups[fabric.worker].allreduce([torch.ones(2)]).wait()
        assert fabric.poisoned
        assert "remote process exited" in fabric.poison_reason


def test_a_mistake_of_a_script_ends_it_and_frees_the_others() -> None:
    with passing() as p:
        fabric = p.circle.fabrics[0]
        p.circle.each(p.inner)[0]._backend = Broken(ValueError("not that shape"))
        with pytest.raises(ValueError, match="not that shape"):
            p.groups[fabric.worker].allreduce([torch.ones(2)])
        assert fabric.poisoned, "the other ranks would wait for it"


def test_an_object_after_an_abort_is_none() -> None:
    """A size without a sender may be any number."""
    with passing() as p:
        fabric = p.circle.fabrics[1]
        group = p.groups[fabric.worker]
        fabric.poison("a rank is lost")

        def broadcast_object_list() -> Tensor:
            size = torch.full((1,), 123456789)
            opts = dist.BroadcastOptions()
            opts.rootRank = 0
            group.broadcast([size], opts).wait()
            return size

        # The group finds by the caller's name and module that this is a part of an object.
        scope = {**globals(), "__name__": dist.distributed_c10d.__name__, "group": group}
        call = FunctionType(
            broadcast_object_list.__code__, scope, closure=broadcast_object_list.__closure__
        )
        assert call().item() == len(NONE)


def test_a_result_that_the_script_has_changed_stays_as_it_is() -> None:
    """Before a vote all operations are waited for once more. Gloo copies the result of a
    reduce-scatter at each wait: with HSDP it undid the sum over the replicas."""

    def act(fabric: Fabric) -> list[float]:
        group, out = p.groups[fabric.worker], torch.zeros(2)
        given = torch.arange(2.0 * SIZE)
        group.reduce_scatter_single(out, given, dist.ReduceScatterOptions()).wait()
        assert out.tolist() == (given.view(SIZE, 2)[group.rank()] * SIZE).tolist()
        out.fill_(7.0)
        fabric.settle()
        return out.tolist()

    with passing() as p:
        assert p.circle.each(act) == [[7.0, 7.0]] * SIZE


def test_a_call_does_not_wait_for_an_earlier_one_that_nobody_waits_for() -> None:
    """tmd's own way carries the first one, an inner group the second; other ranks come later."""
    with passing() as p, ThreadPoolExecutor() as threads:
        integers = [torch.ones(4, dtype=torch.int64) for _ in range(SIZE)]
        floats = [torch.ones(4) for _ in range(SIZE)]
        groups = [p.groups[fabric.worker] for fabric in p.circle.fabrics]
        building = [threads.submit(g._in_use, [[floats[r]]]) for r, g in enumerate(groups)]
        assert all(each.result(SOON_S) for each in building)

        def both(rank: int) -> list[dist.Work]:
            return [groups[rank].allreduce([each[rank]]) for each in (integers, floats)]

        works = threads.submit(both, 0).result(SOON_S)
        for rank in range(1, SIZE):
            works += threads.submit(both, rank).result(SOON_S)
        for work in works:
            work.wait()

    assert all(bool((each == SIZE).all()) for each in (*integers, *floats))
