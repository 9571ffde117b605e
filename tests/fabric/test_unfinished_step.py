"""A rank is lost in the middle of a step, and a worker that follows it finishes the step."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.fabric.circle import PATIENCE, Circle, at_once, circle, member, sync
from tmd.core.values.errors import IllegalTransition, LinkError
from tmd.core.worker.broken_step import Place, Progress, Rerun, reruns
from tmd.fabric import Fabric, Group, Neutral
from tmd.fabric.callbacks import on_own_thread
from tmd.fabric.collectives import on_tensors
from tmd.fabric.counters import CallCounter
from tmd.fabric.frame import FrameKind
from tmd.fabric.grouping import Groups
from tmd.fabric.kept_calls import DIGEST_LIMIT, CollectiveCall, KeptInputs, MemoryPool
from tmd.fabric.step_log import StepLog
from tmd.fabric.unfinished_step import ENDS_OPERATIONS, TABLE, StepEvent, StepState, UnfinishedStep
from tmd.fabric.wait_timer import WaitTimer
from tmd.fabric.work import SLICE_S, Work
from tmd.trainer.protocol.step_vote import exchange

pytestmark = pytest.mark.timeout(60)
LARGE, SMALL = 100_000, 12
SOON_S, SHORT_S = 20.0, 0.2
SIZE = 3
STEP = 7


# --- the table ------------------------------------------------------------------------------------


def at(state: StepState) -> UnfinishedStep:
    step = UnfinishedStep(Groups(), CallCounter())
    step.on_break = lambda: None
    begin, broke = partial(step.begin, keeps=True), partial(step.broke, 1)
    ways: dict[StepState, list[Callable[[], object]]] = {
        StepState.CLOSED: [],
        StepState.OPEN: [begin],
        StepState.SUSPENDED: [begin, broke],
        StepState.VOID: [begin, broke, step.give_up],
        StepState.FAILED: [begin, step.fail],
    }
    for act in ways[state]:
        act()
    assert step.state is state
    return step


WAITS = (StepEvent.BEGUN, StepEvent.ENDED, StepEvent.UNDONE, StepEvent.RAISED)
"""What the main thread does, which waits while the step is suspended: that is the next test."""
CELLS = [
    (state, event)
    for state in StepState
    for event in StepEvent
    if not (state is StepState.SUSPENDED and event in WAITS)
]


@pytest.mark.parametrize(("state", "event"), CELLS)
def test_every_cell_of_the_table(state: StepState, event: StepEvent) -> None:
    """A call that the table does not allow changes nothing: any of them may come at any time."""
    step = at(state)
    acts: dict[StepEvent, Callable[[], object]] = {
        StepEvent.BROKE: partial(step.broke, 1),
        StepEvent.RESUMED: step.resume,
        StepEvent.GIVEN_UP: step.give_up,
        StepEvent.ENDED: step.end,
        StepEvent.RAISED: step.fail,
    }
    row = dict(TABLE[state])
    # A script that tries a step again in one batch ends its first attempt, unless that is void.
    row.setdefault(StepEvent.BEGUN, state if state in ENDS_OPERATIONS else StepState.OPEN)
    # At its next batch a script has left every step, unless it has failed.
    failed = state is StepState.FAILED
    row.setdefault(StepEvent.UNDONE, state if failed else StepState.CLOSED)
    acts[StepEvent.BEGUN] = partial(step.begin, keeps=True)
    acts[StepEvent.UNDONE] = step.leave_behind
    acts[event]()
    assert step.state is row.get(event, state)


@pytest.mark.parametrize("event", StepEvent)
def test_a_move_that_the_table_does_not_allow_raises(event: StepEvent) -> None:
    for state in StepState:
        if event in TABLE[state]:
            continue
        step = at(state)
        with pytest.raises(IllegalTransition):
            step._move(event)
        assert step.state is state


@pytest.mark.parametrize("void", [False, True])
def test_the_end_of_a_suspended_step_waits_for_the_decision(void: bool) -> None:
    step = at(StepState.SUSPENDED)
    ended: queue.SimpleQueue[bool] = queue.SimpleQueue()
    threading.Thread(target=lambda: ended.put(step.end()), daemon=True).start()
    (step.give_up if void else step.resume)()
    assert ended.get(timeout=PATIENCE) is void
    assert step.state is (StepState.VOID if void else StepState.CLOSED)


def test_a_step_without_anybody_who_could_finish_it_is_not_suspended() -> None:
    step = UnfinishedStep(Groups(), CallCounter())
    step.begin(keeps=True)
    step.broke(1)
    assert step.state is StepState.OPEN


# --- jobs -----------------------------------------------------------------------------------------


class Mirror:
    """Tap of a rank, and the source of the worker that follows it."""

    follows = True

    def __init__(self) -> None:
        self._sent: queue.SimpleQueue[list[Tensor] | None] = queue.SimpleQueue()
        self.lost = False

    def given(self, op: str, group: str, inputs: Sequence[Tensor]) -> str:
        return ""

    def output(self, op: str, group: str, outputs: Sequence[Tensor], given: str = "") -> None:
        self._sent.put([t.clone() for t in outputs])

    def voted(self, result: Sequence[int]) -> None: ...

    def shifted(self, offset: int, payload: bytes) -> None: ...

    def end(self) -> None:
        self._sent.put(None)

    def outputs(
        self, op: str, group: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        found = None if self.lost else self._sent.get(timeout=PATIENCE)
        if found is None:
            self.lost = True
            raise LinkError("the rank is gone")
        for out, value in zip(outputs, found, strict=True):
            out.copy_(value)

    def spoil(self) -> None:
        self.lost = True

    def vote(self, values: Sequence[int]) -> tuple[int, ...]:
        raise LinkError("no vote here")

    def shift(self, payload: bytes, offset: int) -> bytes:
        raise LinkError("no shift here")


T = TypeVar("T")
Operation = Callable[[Group, Tensor], Tensor]


def allreduce(group: Group, own: Tensor) -> Tensor:
    work = group.allreduce([own])
    work.wait()
    return own


def allgather(group: Group, own: Tensor) -> Tensor:
    found = torch.empty(SIZE * own.numel())
    group.all_gather_single(found, own).wait()
    own.zero_()  # a script may change its input afterwards
    return found


def reduce_scatter(group: Group, own: Tensor) -> Tensor:
    part = own.numel() // SIZE
    found = torch.empty(part)
    group.reduce_scatter_single(found, own[: part * SIZE].clone()).wait()
    return found


def broadcast(group: Group, own: Tensor) -> Tensor:
    opts = dist.BroadcastOptions()
    opts.rootRank, opts.rootTensor = 1, 0
    group.broadcast([own], opts).wait()
    return own


def barrier(group: Group, own: Tensor) -> Tensor:
    group.barrier().wait()
    return own


OPERATIONS = (allreduce, allgather, reduce_scatter, broadcast, barrier)
Script = Sequence[tuple[int, int]]
"""(operation, length) of each operation of a step."""


def own_data(rank: int, number: int, length: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(100 * rank + number))


class Lost(Exception):
    """The worker ends here."""


def run(
    fabric: Fabric, group: Group, script: Script, before: Callable[[int], None] = lambda _: None
) -> list[Tensor]:
    """One step: several operations at once, the last one alone."""
    rank, found = fabric.rank, []
    assert rank is not None
    for number, (which, length) in enumerate(script):
        before(number)
        found.append(OPERATIONS[which](group, own_data(rank, number, length)))
    return found


class Job:
    """Ranks, and a worker that follows rank ``lost``. Those of ``late`` have yet to begin."""

    def __init__(self, c: Circle, lost: int, late: Collection[int] = ()) -> None:
        self.circle, self.lost = c, lost
        c.group()
        self.mirror = Mirror()
        c.fabrics[lost].tap = self.mirror
        self.joiner = c.standby("joiner", lost)
        self.joiner.sandbox(self.mirror, lost, SIZE)
        self.later = c.membership.replaced({lost: member(self.joiner)}, 2)
        self.members = [f for i, f in enumerate(c.fabrics) if i != lost] + [self.joiner]
        self.decided: dict[str, dict[str, Rerun] | None] = {}
        self._ready = threading.Barrier(len(self.members))
        self._known = threading.Event()
        self._killing = threading.Lock()
        self._before = [f.standing for f in c.fabrics if f.standing is not None]
        self._late = [f for f in self.members if self.later.rank_of(f.worker) in late]
        for fabric in self.members:
            if fabric in self._late:
                continue
            fabric.step.on_break = threading.Timer(0, self._decide, (fabric,)).start
            fabric.step.begin(keeps=True)

    def _decide(self, fabric: Fabric) -> None:
        """What a worker does while its step is suspended."""
        self._ready.wait(PATIENCE)
        rank = self.later.rank_of(fabric.worker)
        assert rank is not None
        fabric.enter(self.later, rank, mid_step=True)
        places = exchange(fabric, fabric.step.place(STEP), Place)
        again = self.decided[fabric.worker] = reruns(places)
        if again is None:
            fabric.step.give_up()
        else:
            fabric.step.go_back(again)
            fabric.step.resume()

    def _begin_late(self, fabric: Fabric) -> None:
        """What a worker does that has yet to begin the step: it enters the epoch first."""
        self._known.wait(PATIENCE)
        self._ready.wait(PATIENCE)
        rank = self.later.rank_of(fabric.worker)
        assert rank is not None
        fabric.enter(self.later, rank)
        places = exchange(fabric, fabric.step.place_before(STEP), Place)
        again = self.decided[fabric.worker] = reruns(places)
        fabric.step.expect(again or {})
        fabric.step.begin(keeps=True)

    def kill(self) -> None:
        """The worker of the rank ends. A plan tells the others, whether or not they notice."""
        with self._killing:
            if self._known.is_set():
                return
            self.circle.fabrics[self.lost].poison("killed")
            self.mirror.end()
            for standing in self._before:
                standing.poison("a plan orders a halt")
            self.joiner.step.broke(self.circle.membership.epoch)
            self._known.set()

    def step(self, script: Script, dies_before: int, *, inside: bool) -> list[list[Tensor] | None]:
        """Run ``script`` on all; returns the results by rank, those of the joiner for its rank."""

        def dying(fabric: Fabric) -> None:
            def before(number: int) -> None:
                if number == dies_before and not inside:
                    raise Lost
                if number == dies_before:
                    threading.Timer(0, self.kill).start()
                if number > dies_before:
                    raise Lost

            with suppress(Lost):
                run(fabric, self.circle.of(fabric), script, before)
            self.kill()

        def living(fabric: Fabric) -> list[Tensor]:
            if fabric in self._late:
                self._begin_late(fabric)
            found = run(fabric, self.circle.of(fabric), script)
            self._known.wait(PATIENCE)
            fabric.step.end()
            fabric.step.leave_behind()
            return found

        dead = self.circle.fabrics[self.lost]
        acts = [partial(dying, dead), *(partial(living, f) for f in self.members)]
        results = dict(zip([dead, *self.members], at_once(acts), strict=True))
        by_rank = {self.later.rank_of(f.worker): results[f] for f in self.members}
        return [by_rank[rank] for rank in range(SIZE)]


@contextmanager
def job(lost: int, late: Collection[int] = ()) -> Iterator[Job]:
    with circle(SIZE) as c:
        yield Job(c, lost, late)


def undisturbed(script: Script) -> list[list[Tensor]]:
    with circle(SIZE) as c:
        c.group()
        return c.each(lambda f: run(f, c.of(f), script))


def same(found: list[list[Tensor] | None], expected: list[list[Tensor]]) -> bool:
    return all(
        torch.equal(a, b)
        for mine, theirs in zip(found, expected, strict=True)
        for a, b in zip(mine or (), theirs, strict=True)
    )


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("number", range(4))
def test_the_step_is_finished_with_the_same_bits(number: int, inside: bool) -> None:
    """Wherever the rank ends: each operation gives every rank what an undisturbed one gives."""
    script = [(0, LARGE), (1, SMALL), (2, LARGE), (0, SMALL)]
    with job(lost=1) as j:
        found = j.step(script, number, inside=inside)
        assert all(decided is not None for decided in j.decided.values())
        assert len(j.decided) == SIZE
        assert same(found, undisturbed(script))


def test_a_thread_that_has_completed_its_operation_is_waited_for() -> None:
    """On a busy machine it may end late. Without the wait the step could not be finished."""
    with circle(SIZE) as c:
        c.group()
        c.each(lambda f: run(f, c.of(f), [(0, SMALL)]))
        fabric, let_go = c.fabrics[0], threading.Event()
        fabric.step.on_break = lambda: None
        began: queue.SimpleQueue[StepState] = queue.SimpleQueue()

        def end() -> None:
            let_go.wait(PATIENCE)

        def begin() -> None:
            fabric.step.begin(keeps=True)
            began.put(fabric.step.state)

        c.of(fabric)._runner.lane.run(end, inline=False)
        threading.Thread(target=begin, daemon=True).start()
        with pytest.raises(queue.Empty):
            began.get(timeout=0.1)
        let_go.set()

        assert began.get(timeout=PATIENCE) is StepState.OPEN


@pytest.mark.parametrize("late", [(0,), (1,), (0, 1), (0, 2)])
def test_ranks_that_have_not_begun_the_step_take_part_in_it(late: tuple[int, ...]) -> None:
    """Survivors, the worker that follows the lost rank, or both."""
    script = [(0, LARGE), (1, SMALL), (0, SMALL)]
    with job(1, late) as j:
        found = j.step(script, 0, inside=False)
        assert len(j.decided) == SIZE
        assert all(again and again["0"].first == 0 for again in j.decided.values())
        assert same(found, undisturbed(script))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.integers(0, len(OPERATIONS) - 1), st.sampled_from([SMALL, LARGE])),
        min_size=1,
        max_size=5,
    ),
    st.data(),
)
def test_any_step_is_finished_or_void_for_all(
    script: list[tuple[int, int]], data: st.DataObject
) -> None:
    """No worker finishes a step that another one repeats."""
    lost, number = data.draw(st.integers(0, SIZE - 1)), data.draw(st.integers(0, len(script) - 1))
    with job(lost) as j:
        found = j.step(script, number, inside=data.draw(st.booleans()))
        decided = list(j.decided.values())
        assert len(decided) == SIZE
        assert all(each == decided[0] for each in decided)
        if decided[0] is not None:
            assert same(found, undisturbed(script))


# --- what must never run, or count ----------------------------------------------------------------


@contextmanager
def pair() -> Iterator[tuple[Circle, list[Fabric]]]:
    """Two ranks in a step whose operations are kept."""
    with circle(2) as c:
        c.group()
        for fabric in c.fabrics:
            fabric.step.on_break = lambda: None
            fabric.step.begin(keeps=True)
        yield c, c.fabrics


def test_nothing_is_left_to_run_in_a_later_step() -> None:
    """A second loss ends the step before the ranks have run operations again for each other."""
    with pair() as (c, (fabric, _)):
        c.allreduce(SMALL)
        fabric.poison("a loss")
        log = c.of(fabric).log
        log.go_back(Rerun(0, 1))
        assert log.to_repeat
        fabric.step.give_up()
        assert not log.to_repeat


def test_an_operation_that_ended_without_a_result_is_not_run_again() -> None:
    """An error in a call skips the operation: no other rank may wait for it."""
    with pair() as (c, (fabric, other)):
        c.allreduce(SMALL)
        assert fabric.step.place(STEP).groups["0"].kept == 0
        fabric.step.on_break = None
        fabric.poison("a loss")
        c.of(fabric).allreduce([torch.ones(SMALL)]).wait()
        assert fabric.step.place(STEP).groups["0"].kept < 0
        assert other.step.place(STEP).groups["0"].kept == 0


@pytest.mark.parametrize("differs", [False, True])
def test_an_operation_that_is_run_again_gives_the_same_bits(differs: bool) -> None:
    """Or the epoch breaks: ranks would go on with other results of one operation."""
    with pair() as (c, fabrics):
        c.allreduce(SMALL)
        if differs:
            kept = c.of(fabrics[1]).log._kept[0]
            assert isinstance(kept, KeptInputs)
            kept.inputs[0][3] += 1
        c.each(lambda f: (f.step.go_back({"0": Rerun(0, 1)}), f.drain()))
        assert all(fabric.poisoned is differs for fabric in fabrics)


def test_a_vote_waits_for_an_operation_that_is_run_again() -> None:
    """It may show that the ranks have other results: then nobody commits the step."""
    with pair() as (c, fabrics), ThreadPoolExecutor() as threads:
        c.allreduce(SMALL)
        kept = c.of(fabrics[1]).log._kept[0]
        assert isinstance(kept, KeptInputs)
        kept.inputs[0][3] += 1
        busy, go_on = threading.Event(), threading.Event()

        def occupy() -> None:
            busy.set()
            go_on.wait()

        c.of(fabrics[0])._runner.lane.run(occupy, inline=False)
        busy.wait()
        for fabric in fabrics:
            fabric.step.go_back({"0": Rerun(0, 1)})
        votes = [threads.submit(fabric.reduce_min, (1,)) for fabric in fabrics]
        done, _ = concurrent.futures.wait(votes, SHORT_S)
        go_on.set()

        assert not done
        assert all(isinstance(vote.exception(), LinkError) for vote in votes)


def test_a_vote_waits_for_a_collective_that_nobody_waits_for() -> None:
    """If a rank were lost after the vote, a committed step would contain garbage."""
    with circle(2) as c, ThreadPoolExecutor() as threads:
        c.group()
        first, second = c.fabrics
        mine, theirs = torch.ones(SMALL), torch.ones(SMALL)
        work = c.of(first).allreduce([mine])
        votes = [threads.submit(fabric.reduce_min, (1,)) for fabric in c.fabrics]
        done, _ = concurrent.futures.wait(votes, SHORT_S)
        c.of(second).allreduce([theirs]).wait()

        assert not done
        assert [vote.result(SOON_S) for vote in votes] == [(1,), (1,)]
        assert work.is_completed()


def test_the_time_of_a_suspension_is_not_that_of_a_wait() -> None:
    """The script's time-out is for a peer, not for the leader's decision."""
    with pair() as (_, (fabric, _)):
        assert not fabric.blocked.paused()
        fabric.poison("a loss")
        fabric.step.broke(1)
        assert fabric.blocked.paused()

    looks = [threading.Event() for _ in range(10)]
    unseen = iter(looks)

    def paused() -> bool:
        if (look := next(unseen, None)) is None:
            return False
        look.set()
        return True

    work = Work([], WaitTimer(paused))
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(work.wait, timedelta(seconds=SLICE_S * 2))
        assert looks[-1].wait(SOON_S), "it has waited five times as long"
        with pytest.raises(RuntimeError, match="not complete after"):
            waiting.result(SOON_S)


def test_operations_in_inference_mode_are_kept_like_others() -> None:
    """What they leave in the pool of memory is written outside of that mode later."""
    with pair() as (c, fabrics):
        for step in range(4):
            for fabric in fabrics:
                fabric.step.begin(keeps=True)
            c.allreduce(SMALL)
            if step == 0:
                c.each(lambda f: inferred(c.of(f), SMALL))
                c.each(lambda f: inferred(c.of(f), LARGE))
            c.allreduce(LARGE)
        assert not any(fabric.poisoned for fabric in fabrics)


def test_an_operation_on_a_conjugated_tensor_is_kept_like_others() -> None:
    """Such a tensor has the memory of another one, whose values it shows with the other sign."""
    with pair() as (c, fabrics):

        def conjugated(fabric: Fabric) -> complex:
            tensor = torch.full((4,), 1 + 2j, dtype=torch.complex64).conj()
            work = c.of(fabric).allreduce([tensor], sync())
            work.wait()
            assert work.exception() is None
            return tensor[0].item()

        assert c.each(conjugated) == [2 - 4j] * 2
        assert not any(fabric.poisoned for fabric in fabrics)


def inferred(group: Group, length: int) -> None:
    with torch.inference_mode():
        group.allreduce([torch.ones(length)], sync()).wait()


@pytest.mark.parametrize("leave", ["enters", "steps aside"])
def test_a_loss_that_is_found_late_concerns_no_step_of_the_next_epoch(leave: str) -> None:
    """A thread marks the epoch as poisoned, and comes to the step only when that goes on."""
    with circle(1) as c:
        c.group()
        fabric, old = c.fabrics[0], c.fabrics[0].standing
        assert old is not None
        breaks: list[int] = []
        fabric.step.on_break = lambda: breaks.append(1)
        if leave == "enters":
            fabric.enter(c.membership.replaced({0: member(fabric)}, 2), 0)
        else:
            fabric.sandbox(Neutral(), 0, 1)
        fabric.step.begin(keeps=True)

        fabric._poisoned(old)

        assert fabric.step.state is StepState.OPEN
        assert not breaks
        assert not fabric.poisoned


def test_nothing_of_a_void_step_runs_after_the_next_batch() -> None:
    """Also what the script has called and does not wait for."""
    with pair() as (c, (fabric, _)):
        fabric.poison("a loss")
        fabric.step.broke(1)
        works = [c.of(fabric).allreduce([torch.ones(SMALL)]) for _ in range(3)]
        assert not any(work.is_completed() for work in works)
        fabric.step.give_up()
        assert fabric.step.end()
        fabric.step.leave_behind()
        assert all(work.is_completed() for work in works)
        assert fabric.step.state is StepState.CLOSED


def test_a_rank_that_has_failed_neither_waits_for_the_others_nor_meets_them() -> None:
    """Its script may call a barrier in a ``finally``. The others call the operations of a step. A
    result that looks like one could be saved."""
    with pair() as (c, (fabric, other)):
        theirs = c.of(other).allreduce([torch.ones(SMALL)])
        fabric.step.begin(keeps=True)
        fabric.step.fail()
        c.of(fabric).barrier().wait(timedelta(seconds=SOON_S))
        c.of(fabric).send([torch.ones(SMALL)], 1, 0).wait(timedelta(seconds=SOON_S))
        with pytest.raises(RuntimeError, match=r"recv has no result: the script of this rank"):
            c.of(fabric).recv([torch.ones(SMALL)], 1, 0).wait(timedelta(seconds=SOON_S))
        with pytest.raises(RuntimeError, match=r"allreduce has no result"):
            c.of(fabric).allreduce([torch.ones(SMALL)]).wait(timedelta(seconds=SOON_S))
        assert not theirs.is_completed()
        assert not fabric.poisoned
        assert not other.poisoned


def test_a_process_that_ends_waits_for_no_plan() -> None:
    """Operations of its suspended step end, so that its threads do."""
    with pair() as (c, (fabric, _)):
        fabric.poison("a loss")
        fabric.step.broke(1)
        work = c.of(fabric).allreduce([torch.ones(SMALL)])
        fabric.close()
        assert work.is_completed()


def test_no_memory_is_kept_once_nobody_follows() -> None:
    with pair() as (c, fabrics):
        c.allreduce(SMALL)
        assert all(fabric.step.nbytes >= 4 * SMALL for fabric in fabrics)
        for fabric in fabrics:
            fabric.step.begin(keeps=False)
        assert all(fabric.step.nbytes == 0 for fabric in fabrics)


@pytest.mark.parametrize("unlike", ["several", "complex", "max"])
def test_other_large_allreduces_keep_their_inputs(unlike: str) -> None:
    """Several tensors may share memory; the result of an element may depend on its place with
    complex numbers, and with the largest of zeros or NaNs."""
    with pair() as (c, fabrics):
        one = torch.ones(LARGE, dtype=torch.complex64 if unlike == "complex" else torch.float32)
        count = 2 if unlike == "several" else 1
        opts = sync(reduceOp=dist.ReduceOp.MAX if unlike == "max" else dist.ReduceOp.SUM)
        c.each(lambda f: c.of(f).allreduce([one.clone() for _ in range(count)], opts).wait())
        assert all(isinstance(c.of(f).log._kept[0], KeptInputs) for f in fabrics)


def test_outputs_whose_memory_the_script_has_freed_count_as_different() -> None:
    """As FSDP1 frees a gathered buffer. Reading it would end the process."""
    outputs = [torch.ones(DIGEST_LIMIT)]
    call = CollectiveCall(FrameKind.BARRIER, on_tensors.barrier, outputs, [torch.ones(LARGE)])
    kept = KeptInputs(call, call.inputs, MemoryPool(1 << 20))
    kept.completed()
    outputs[0].untyped_storage().resize_(0)

    assert not kept._matches([torch.ones(DIGEST_LIMIT)])


def test_an_operation_that_runs_again_is_known() -> None:
    """Its tensors may hold parts of its result: no joiner may compare them with its inputs."""
    log, seen = StepLog(), []
    log.restart(keeps=True)
    tensors = [torch.ones(LARGE)]
    call = CollectiveCall(FrameKind.BARRIER, on_tensors.barrier, tensors, tensors)
    for _ in range(2):
        log.begin(call, tensors)
        seen.append(log.repeats)
    assert seen == [False, True]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_large_allreduce_needs_no_memory(size: int) -> None:
    """Neither for inputs nor for sums: it can be finished from what its tensor holds."""
    with circle(size) as c:
        c.group()
        c.each(lambda f: f.step.begin(keeps=True))
        for fabric in c.fabrics:
            fabric.step.on_break = lambda: None
        for _ in range(3):
            c.allreduce(LARGE)
        assert [fabric.step.nbytes for fabric in c.fabrics] == [0] * size
        assert all(f.step.place(STEP).groups["0"] == Progress(3, 0, 3) for f in c.fabrics)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_whose_step_cannot_be_finished_reduces_with_the_others(size: int) -> None:
    """It has sent a message, or has joined with a copy of the state: the others do not know."""
    with circle(size) as c:
        c.group()
        c.each(lambda f: f.step.begin(keeps=f.rank != 0))
        reduced = c.allreduce(LARGE)
        assert all(torch.equal(each, reduced[0]) for each in reduced)
        assert [f.step.can_go_on for f in c.fabrics] == [False, *[True] * (size - 1)]


def test_the_oldest_are_dropped_beyond_the_bound() -> None:
    """The running operation and the one before it are kept whatever their size."""
    log = StepLog(bound=10_000)
    log.restart(keeps=True)
    kept = []
    for length in (100, 100, 1000, LARGE, LARGE):
        tensors = [torch.ones(length)]
        log.begin(CollectiveCall(FrameKind.BARRIER, on_tensors.barrier, tensors, tensors), tensors)
        log.end()
        kept.append(log.progress.kept)
    assert kept == [0, 0, 0, 2, 3]


# --- beside the steps -------------------------------------------------------------------------


def until(turn: threading.Event) -> None:
    assert turn.wait(PATIENCE)


@pytest.mark.parametrize("sends", [True, False])
def test_a_message_that_waits_for_its_turn_keeps_a_step_from_going_on(sends: bool) -> None:
    """A standby has called it behind a collective. Once it had taken the rank, the receive would
    end without a message, and the send would be overtaken by a later one."""
    with circle(2) as c:
        c.group()
        joiner = c.standby("joiner")
        group = c.of(joiner)
        joiner.step.on_break = lambda: None
        joiner.step.begin(keeps=True)
        turn = threading.Event()
        group._runner.lane.run(partial(until, turn), inline=False)
        tensor = torch.zeros(1)
        work = group.send([tensor], 1) if sends else group.recv([tensor], 1)
        queued = not work.is_completed()
        can_go_on = joiner.step.can_go_on
        turn.set()
        work.wait()

        assert queued
        assert not can_go_on


def test_a_receive_of_a_standby_does_not_end_without_a_message_when_it_has_the_rank() -> None:
    with circle(2) as c:
        c.group()
        joiner = c.standby("joiner")
        group = c.of(joiner)
        turn = threading.Event()
        group._runner.lane.run(partial(until, turn), inline=False)
        work = group.recv([torch.zeros(1)], 1)
        joiner.enter(c.membership.replaced({0: member(joiner)}, 2), 0, mid_step=True)
        turn.set()
        work.wait()

        assert "before this worker became rank 0" in joiner.poison_reason


def in_thread(call: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result(PATIENCE)


def test_a_step_in_which_another_thread_calls_a_collective_does_not_go_on() -> None:
    """As that of an asynchronous checkpoint does, which may call it in another step on another
    rank: then this rank would run it again, and wait for one that has completed it."""
    with circle(2) as c:
        c.group()
        c.group("1")
        fabric = c.fabrics[0]
        fabric.calls.stepping = threading.current_thread()
        fabric.step.on_break = lambda: None
        fabric.step.begin(keeps=True)
        works = [c.of(each).allreduce([torch.ones(1)]) for each in reversed(c.fabrics)]
        for work in works:
            work.wait()
        own = fabric.step.can_go_on
        c.allreduce(name="1")

        assert own
        assert not fabric.step.can_go_on


def test_a_callback_that_a_step_has_attached_belongs_to_it() -> None:
    """PowerSGD calls the next collective of a bucket in one."""
    counter = CallCounter()
    counter.stepping = threading.current_thread()
    seen: queue.SimpleQueue[bool] = queue.SimpleQueue()
    on_own_thread(lambda: seen.put(counter.of_step()))

    assert seen.get(timeout=PATIENCE)
    assert not in_thread(counter.of_step)
    assert counter.of_step()
