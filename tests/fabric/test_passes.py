"""Collectives in an epoch in which workers have adopted ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.fabric.circle import Circle, circle, sync
from tmd.core.values.errors import LinkError
from tmd.fabric import Fabric, Group
from tmd.fabric.collectives import on_tensors
from tmd.fabric.frame import FrameKind
from tmd.fabric.kept_calls import CollectiveCall
from tmd.fabric.passes import Inelastic, Passes, PassLog, obstacle
from tmd.fabric.reduction import reduction
from tmd.trainer.protocol.step_vote import exchange

pytestmark = pytest.mark.timeout(60)
LARGE, SMALL = 100_000, 12


@contextmanager
def shrunk(size: int, adopted: dict[int, int]) -> Iterator[Circle]:
    """A circle whose adopted ranks have no worker of their own any more."""
    with circle(size) as made:
        made.group()
        later = made.membership.replaced({}, 2).shrunk(adopted)
        made.fabrics = [made.fabrics[rank] for rank in later.crew(range(size))]
        for fabric in made.fabrics:
            fabric.passes.request_elastic("")
            own = later.rank_of(fabric.worker)
            assert own is not None
            fabric.enter(later, own)
        yield made


def passes(fabric: Fabric, body: Callable[[int], None]) -> None:
    """A step of one worker: ``body`` for each of its ranks, the lowest last."""
    held = sorted(fabric.passes.held, reverse=True)
    for number, rank in enumerate(held):
        fabric.passes.begin(rank, first=number == 0, last=number == len(held) - 1)
        fabric.passes.open_step()
        body(rank)
        fabric.drain()
    fabric.passes.open = False
    fabric.passes.end()


def values(rank: int, number: int, length: int) -> Tensor:
    """Whole numbers, whose sums are exact in any order."""
    draw = torch.Generator().manual_seed(100 * rank + number)
    return torch.randint(-99, 99, (length,), generator=draw).float()


@pytest.mark.parametrize("length", [SMALL, LARGE])
@pytest.mark.parametrize("adopted", [{2: 0}, {0: 1, 3: 2}, {1: 0, 2: 0, 3: 0}])
def test_a_reduction_sums_all_ranks_whoever_holds_them(
    adopted: dict[int, int], length: int
) -> None:
    """Also the average, and the largest: each of two operations keeps its own sum."""
    kinds = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX)
    expected = [
        torch.stack([values(rank, n, length) for rank in range(4)]) for n in range(len(kinds))
    ]
    with shrunk(4, adopted) as jobs:

        def step(fabric: Fabric) -> list[Tensor]:
            found: list[Tensor] = []

            def body(rank: int) -> None:
                tensors = [values(rank, n, length) for n in range(len(kinds))]
                works = []
                for tensor, kind in zip(tensors, kinds, strict=True):
                    opts = dist.AllreduceOptions()
                    opts.reduceOp = dist.ReduceOp(kind)
                    works.append(jobs.of(fabric).allreduce([tensor], opts))
                for work in works:
                    work.wait()
                found[:] = tensors

            passes(fabric, body)
            passes(fabric, body)  # nothing of the step before is left
            return found

        for sums, means, most in jobs.each(step):
            assert torch.equal(sums, expected[0].sum(0))
            assert torch.equal(means, expected[1].sum(0) / 4)
            assert torch.equal(most, expected[2].max(0).values)


def test_the_script_sees_the_rank_of_the_pass_and_between_steps_the_lowest() -> None:
    with shrunk(4, {0: 1, 3: 2}) as jobs:

        def ranks(fabric: Fabric) -> tuple[list[int], int, int]:
            seen: list[int] = []
            passes(fabric, lambda rank: seen.append(jobs.of(fabric).rank()))
            return seen, jobs.of(fabric).rank(), jobs.of(fabric).size()

        assert jobs.each(ranks) == [([1, 0], 0, 4), ([3, 2], 2, 4)]


@pytest.mark.parametrize("root", range(4))
def test_a_broadcast_gives_every_pass_the_same(root: int) -> None:
    """What all ranks have computed alike, such as DDP's buffers, whoever holds the root."""
    with shrunk(4, {0: 1, 3: 2}) as jobs:

        def step(fabric: Fabric) -> list[float]:
            seen: list[float] = []

            def body(rank: int) -> None:
                holds_root = root in fabric.passes.held
                tensor = torch.full((4,), 7.0 if holds_root else float("nan"))
                options = dist.BroadcastOptions()
                options.rootRank = root
                jobs.of(fabric).broadcast([tensor], options).wait()
                seen.append(float(tensor[0]))
                jobs.of(fabric).barrier(sync()).wait()

            passes(fabric, body)
            return seen

        assert jobs.each(step) == [[7.0, 7.0], [7.0, 7.0]]


def differing(group: Group, rank: int) -> None:
    """A broadcast of what only the root has computed."""
    group.broadcast([torch.tensor([float(rank)])], 0).wait()


def late(group: Group, rank: int) -> None:
    group.allreduce([torch.ones(1)], sync()).wait()
    group.broadcast([torch.ones(1)], 0).wait()


def gathered(group: Group, rank: int) -> None:
    group.allgather([[torch.ones(1) for _ in range(3)]], [torch.ones(1)]).wait()


def sent(group: Group, rank: int) -> None:
    group.send([torch.ones(1)], (rank + 1) % 3).wait()


def uneven(group: Group, rank: int) -> None:
    for _ in range(rank + 1):
        group.allreduce([torch.ones(1)], sync()).wait()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (differing, "broadcast what only rank 0 has computed"),
        (late, "broadcast after a reduction"),
        (gathered, "its script calls allgather"),
        (sent, "its script calls send or recv"),
    ],
)
def test_what_passes_cannot_share_abandons_the_epoch_and_says_why(
    body: Callable[[Group, int], None], why: str
) -> None:
    """Nothing wrong is computed: the step breaks everywhere, and the worker says why."""
    with shrunk(3, {2: 0}) as jobs:

        def step(fabric: Fabric) -> None:
            with suppress(RuntimeError):
                passes(fabric, lambda rank: body(jobs.of(fabric), rank))
            with pytest.raises(LinkError):
                fabric.reduce_min([1])

        jobs.each(step)
        reasons = [fabric.passes.inelastic or "" for fabric in jobs.fabrics]

        assert any(why in reason for reason in reasons), reasons
        assert all(fabric.poisoned for fabric in jobs.fabrics)


def test_a_broadcast_in_one_group_may_not_follow_a_reduction_in_another() -> None:
    """A worker with one rank would wait in the reduction, for one that waits for its broadcast."""
    with circle(3) as jobs:
        jobs.group()
        jobs.group("other")
        adopter = jobs.fabrics[0]
        later = jobs.membership.replaced({}, 2).shrunk({1: 0, 2: 0})
        adopter.passes.request_elastic("")
        adopter.enter(later, 0)

        def body(rank: int) -> None:
            jobs.of(adopter).allreduce([torch.ones(1)], sync()).wait()
            jobs.of(adopter, "other").broadcast([torch.ones(1)]).wait()

        with pytest.raises(RuntimeError, match="broadcast after a reduction"):
            passes(adopter, body)
        assert adopter.poisoned


def test_passes_with_unequal_operations_are_not_complete() -> None:
    """The vote would else commit a sum that lacks a rank."""
    with shrunk(3, {2: 0}) as jobs:
        (adopter, _) = jobs.fabrics
        group = jobs.of(adopter)
        adopter.passes.begin(2, first=True, last=False)
        adopter.passes.open_step()
        work = group.allreduce([torch.ones(1)])
        work.wait()
        adopter.drain()
        adopter.passes.begin(0, first=False, last=True)

        assert not adopter.passes.complete


def test_votes_and_exchanges_are_among_the_workers() -> None:
    with shrunk(5, {0: 1, 3: 2}) as jobs:
        votes = jobs.each(lambda f: f.reduce_min([f.passes.seat[0] + 4, 9]))
        said = jobs.each(lambda f: exchange(f, f.worker, str))

        assert votes == [(4, 9)] * 3
        assert said == [("w1", "w2", "w4")] * 3


@pytest.mark.parametrize(
    ("kind", "in_step", "shared"),
    [
        (FrameKind.ALLREDUCE, True, True),
        (FrameKind.ALLREDUCE, False, False),
        (FrameKind.BROADCAST, True, True),
        (FrameKind.BARRIER, True, True),
        (FrameKind.BARRIER, False, False),
        (FrameKind.REDUCE_SCATTER, True, False),
        (FrameKind.MESSAGE, True, False),
    ],
)
def test_which_operations_passes_share(kind: FrameKind, in_step: bool, shared: bool) -> None:
    assert (obstacle(kind, in_step=in_step) == "") is shared


def test_a_barrier_behind_the_set_up_is_none_of_a_step() -> None:
    """Scripts often wait for each other before their loop. A later one no pass can share."""
    passes = Passes(lambda: None)
    passes.request_elastic("")
    passes.saw(FrameKind.BARRIER)
    assert passes.inelastic == ""

    passes.has_stepped = True
    passes.saw(FrameKind.BARRIER)
    assert "barrier between two steps" in (passes.inelastic or "")


def test_operations_of_the_step_before_are_none_of_this_one() -> None:
    """A script may call an operation in some steps, by a counter that counts passes."""
    passes = Passes(lambda: None)
    log, tensors = PassLog(passes), [torch.ones(SMALL)]
    call = CollectiveCall(FrameKind.BARRIER, on_tensors.barrier, tensors, tensors)
    passes.begin(2, first=True, last=False)
    assert log.next(call, tensors) is not None
    passes.begin(0, first=False, last=True)
    assert log.next(call, tensors) is not None
    passes.begin(2, first=True, last=False)
    passes.begin(0, first=False, last=True)

    with pytest.raises(Inelastic, match="call different operations"):
        log.next(call, tensors)


def test_a_script_that_does_not_ask_is_not_watched() -> None:
    with circle(2) as jobs:
        jobs.group()
        asked, other = jobs.fabrics
        asked.passes.request_elastic("")
        jobs.allreduce()

        assert "all" in (asked.passes.inelastic or "")
        assert other.passes.inelastic is None


def test_what_a_broken_step_has_kept_is_dropped() -> None:
    """Its gradients would stay for the rest of the job once no rank is adopted any more."""
    passes = Passes(lambda: None)
    log, tensors = PassLog(passes), [torch.ones(SMALL)]
    how = reduction(dist.ReduceOp.SUM, torch.float32, "all_reduce").code
    call = CollectiveCall(FrameKind.ALLREDUCE, on_tensors.barrier, tensors, tensors, detail=how)
    passes.begin(1, first=True, last=False)
    kept = log.next(call, tensors)
    assert kept is not None
    log.goes_out(call, kept, tensors)
    (copy,) = map(ref, kept.tensors)
    before = copy() is not None
    del kept
    passes.end()

    assert before
    assert copy() is None
