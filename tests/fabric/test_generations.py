"""Inner groups in generations, on communicators that hang and fail as those of NCCL do."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, product

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.fabric.fake_nccl import Cluster, FakeKind, FakeNccl
from tmd.core.values.errors import IllegalTransition
from tmd.core.values.model import Member, Membership
from tmd.fabric.generations.beside import BesideBuilds
from tmd.fabric.generations.generations import BUILT_S, HUNG_LIMIT, GenerationLimits, Generations
from tmd.fabric.generations.inner import BuildTime, CannotBuildBeside, GroupRequest
from tmd.fabric.generations.states import TABLE, GenerationEvent, GenerationState, transition
from tmd.fabric.grouping import GroupView

pytestmark = pytest.mark.timeout(120)

WORLD, PAIR = GroupView("world", (0, 1, 2)), GroupView("pair", (0, 1))
VIEWS = (WORLD, PAIR)
SOON_S = 20.0
"""Far longer than anything here takes that does not hang."""
SHORT_S = 0.05
"""How long a test waits for what hangs."""


@pytest.mark.parametrize(("state", "event"), [*product(GenerationState, GenerationEvent)])
def test_a_cell_of_the_table(state: GenerationState, event: GenerationEvent) -> None:
    """What the table has happens, and all else is refused."""
    after = TABLE[state].get(event)
    if after is None:
        with pytest.raises(IllegalTransition, match=f"'{event}' cannot happen"):
            transition(state, event)
    else:
        assert transition(state, event) is after


class Job:
    """Three ranks in one process, each with its generations."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.names = (f"w{number}" for number in count())
        self.workers: dict[str, Generations] = {}
        self.epoch = 0
        self.holders = [self.fresh() for _ in WORLD.ranks]
        self.build(self.holders)
        self.switch()

    def fresh(self) -> str:
        """A new worker."""
        name = next(self.names)
        kind = FakeKind(self.cluster, name)
        self.workers[name] = Generations(kind, limits=GenerationLimits(SHORT_S, SHORT_S))
        return name

    def build(self, holders: list[str], when: BuildTime = BuildTime.BESIDE) -> None:
        """Begin to build the next epoch on all its workers, or prepare it."""
        self.epoch += 1
        self.coming = list(holders)
        members = tuple(Member(worker=w, host=w, address="") for w in holders)
        self.prepared = Membership(epoch=self.epoch, members=members)
        for rank, worker in enumerate(holders):
            views = [view for view in VIEWS if rank in view.ranks]
            self.workers[worker].prepare(views, self.prepared, when=when)

    def leavers(self) -> list[str]:
        """Workers that give their rank away."""
        return [w for w in self.holders if w not in {*self.coming, *self.cluster.dead}]

    def switch(self) -> None:
        """All are ready, switch, and free what they no longer use."""
        for worker in self.coming:
            assert self.workers[worker].wait(SOON_S), self.workers[worker].refusal
        for worker in self.coming:
            self.workers[worker].switch(self.prepared)
        leavers = self.leavers()
        for worker in leavers:
            self.workers[worker].leave()
        self.holders, self.held = self.coming, self.prepared
        self.sums()
        for worker in (*self.coming, *leavers):
            self.workers[worker].reap()

    def drop(self) -> None:
        """The move is called off."""
        for worker in self.coming:
            self.workers[worker].discard(self.prepared)

    def lose(self, lost: str) -> list[tuple[torch.Tensor, torch.Tensor, object]]:
        """A rank dies while work runs, which is returned; survivors end it."""
        self.cluster.lose(lost)
        broken = self.launch(lost)
        for worker in self.survivors(lost):
            assert self.abort(worker) == ()
        return broken

    def abort(self, worker: str, within_s: float = SOON_S) -> tuple[str, ...]:
        """A worker notices a loss; returns its groups that hang."""
        self.workers[worker].lose(self.held.epoch)
        return self.workers[worker].await_aborts(within_s)

    def launch(self, *without: str) -> list[tuple[torch.Tensor, torch.Tensor, object]]:
        """An all-reduce in each group, on all other workers: value, expected sum, handle."""
        launched = []
        for rank, worker in enumerate(self.holders):
            for view in VIEWS:
                if rank not in view.ranks or worker in without:
                    continue
                value = torch.full((2,), float(2**rank))
                expected = torch.full((2,), float(sum(2**r for r in view.ranks)))
                generation = self.workers[worker].live(view.name)
                assert generation is not None
                inner = generation.use()
                assert inner is not None
                handle = inner.backend.allreduce([value])
                launched.append((value, expected, handle))
        return launched

    def sums(self) -> None:
        """Each group computes with its present members."""
        for value, expected, handle in self.launch():
            handle.wait()  # type: ignore[attr-defined]
            assert torch.equal(value, expected)

    def survivors(self, lost: str) -> list[str]:
        return [worker for worker in self.holders if worker != lost]


@contextmanager
def job() -> Iterator[Job]:
    made = Job()
    try:
        yield made
    finally:
        made.cluster.end()


def test_only_groups_whose_members_change_are_built_anew() -> None:
    with job() as j:
        first = j.holders[0]
        before = {view.name: j.workers[first].live(view.name) for view in VIEWS}
        j.build([j.holders[0], j.holders[1], j.fresh()])
        j.switch()

        assert j.workers[first].live("pair") is before["pair"]
        assert j.workers[first].live("world") is not before["world"]
        assert before["world"].state is GenerationState.FREED
        assert j.cluster.open == 3 + 2, "one communicator for each rank of each group"


def test_training_goes_on_while_the_next_generation_is_built() -> None:
    with job() as j:
        j.cluster.hanging_builds.add((j.holders[0], "world"))
        j.build([*j.holders[:2], j.fresh()])
        for _ in range(3):
            j.sums()
        assert not j.workers[j.holders[0]].wait(SHORT_S)
        with pytest.raises(IllegalTransition, match="are not ready"):
            j.workers[j.holders[0]].switch(j.prepared)
        j.sums()


def test_a_build_that_fails_says_why_and_harms_nothing() -> None:
    with job() as j:
        j.cluster.failing_builds.add((j.holders[1], "world"))
        j.build([*j.holders[:2], j.fresh()])
        refused = j.workers[j.holders[1]]
        assert not refused.wait(SOON_S)
        assert "unhandled system error" in refused.refusal
        j.drop()
        j.sums()


def test_a_worker_in_which_builds_hang_moves_no_more_but_recovers() -> None:
    """A planned move can be left out; after a loss it must build, whatever hangs."""
    with job() as j:
        stuck = j.holders[0]
        j.cluster.hanging_builds.add((stuck, "world"))
        for _ in range(HUNG_LIMIT + 1):
            assert not j.workers[stuck].obstacle
            j.build([*j.holders[:2], j.fresh()])
            with j.cluster.changed:
                # The next preparation has waited for this one before it begins to build.
                j.cluster.changed.wait_for(lambda: (stuck, "world", j.epoch) in j.cluster.began)
            j.drop()
        assert "hang" in j.workers[stuck].obstacle
        j.sums()

        j.cluster.hanging_builds.clear()
        j.build([*j.holders[:2], j.fresh()])
        j.switch()


def test_a_worker_with_nothing_to_build_prepares_again_and_again() -> None:
    """As each recovery does where tmd's own algorithms carry everything."""
    plain = Generations()
    built: list[str] = []
    members = tuple(Member(worker=w, host=w, address="") for w in ("w0", "w1", "w2"))
    for epoch in range(1, 5):
        plain.prepare(VIEWS, Membership(epoch=epoch, members=members), built.append)
    plain.enter(Membership(epoch=4, members=members))
    assert built == [""] * 4


def given_up(j: Job) -> Generations:
    """A worker whose build of an epoch hangs, and was dropped on all members."""
    slow = Generations(FakeKind(j.cluster, "slow"), limits=GenerationLimits(SOON_S))
    j.workers["slow"] = slow
    j.cluster.hanging_builds.add(("slow", "world"))
    j.build([*j.holders[:2], "slow"])
    with j.cluster.changed:
        j.cluster.changed.wait_for(lambda: ("slow", "world", j.epoch) in j.cluster.began)
    j.drop()
    return slow


def test_a_build_that_was_given_up_is_waited_for_before_the_next() -> None:
    """Two at once may wait for each other."""
    with job() as j:
        slow = given_up(j)
        j.build(j.coming)
        assert not slow.obstacle, "it is slow, and does not hang"
        with j.cluster.changed:
            j.cluster.hanging_builds.clear()
            j.cluster.changed.notify_all()
        j.switch()
        assert "slow" not in j.cluster.overlapped


def test_fifty_losses_with_a_hundred_aborts_none_of_which_hangs() -> None:
    """Work runs in all groups when a rank dies; survivors abort, and build with another worker."""
    with job() as j:
        for number in range(50):
            lost = j.holders[number % 3]
            for _, _, handle in j.lose(lost):
                assert handle.wait()  # type: ignore[attr-defined]
            j.build([j.fresh() if w == lost else w for w in j.holders])
            j.switch()

        assert j.cluster.aborts >= 100
        assert not j.cluster.overlapped


def test_aborting_one_group_after_the_other_would_hang() -> None:
    """So the fake shows why all are aborted at once."""
    with job() as j:
        lost, worker = j.holders[2], j.holders[0]
        other = j.holders[1]
        j.cluster.lose(lost)
        j.cluster.lose(other)
        for view in VIEWS:
            generation = j.workers[worker].live(view.name)
            assert generation is not None
            generation.inner.backend.allreduce([torch.ones(1)])
        world = j.workers[worker].live("world")
        assert world is not None

        alone = threading.Thread(target=world.abort, daemon=True)
        alone.start()
        alone.join(SHORT_S)
        assert alone.is_alive()
        assert j.abort(worker) == ()


def test_opposite_orders_of_two_workers_fail_a_test() -> None:
    """NCCL may hang then, and only sometimes."""
    with job() as j:
        first, second = ([j.workers[w].live(v.name) for v in VIEWS] for w in j.holders[:2])
        assert all((*first, *second))
        for each in first:
            each.inner.backend.allreduce([torch.ones(1)])
        second[1].inner.backend.allreduce([torch.ones(1)])
        with pytest.raises(AssertionError, match="w0 the other way"):
            second[0].inner.backend.allreduce([torch.ones(1)])


def test_an_abort_that_hangs_is_named() -> None:
    with job() as j:
        lost, worker = j.holders[2], j.holders[0]
        j.cluster.lose(lost)
        j.cluster.hanging_aborts.add((worker, "pair"))
        for _ in range(2):
            assert j.abort(worker, SHORT_S) == ("pair",)
        assert j.workers[worker].close(SHORT_S) == ("pair",), "and nothing waits for it"


def test_an_abort_that_takes_too_long_is_reported() -> None:
    """The worker ends then: its main thread may wait for ever."""
    with job() as j:
        reported: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
        hangs = Generations(
            FakeKind(j.cluster, "hangs"),
            limits=GenerationLimits(abort_s=SHORT_S),
            on_hung=reported.put,
        )
        j.workers["hangs"] = hangs
        j.build([*j.holders[:2], "hangs"])
        j.switch()
        j.cluster.hanging_aborts.add(("hangs", "world"))
        hangs.lose(j.held.epoch)
        assert reported.get(timeout=SOON_S) == ("world",)


def test_a_loss_in_another_epoch_ends_nothing() -> None:
    """Its report may come when the survivors have already built their groups anew."""
    with job() as j:
        former = j.held.epoch
        j.build([*j.holders[:2], j.fresh()])
        j.switch()
        for worker in j.holders:
            j.workers[worker].lose(former)
        j.sums()
        assert j.cluster.aborts == 0


def test_a_group_without_a_generation_is_built_when_it_is_first_used() -> None:
    """As at the start of a job, before the script has made its groups."""
    with job() as j:
        late = GroupView("late", (0, 1))
        pair = [j.workers[worker] for worker in j.holders[:2]]
        with ThreadPoolExecutor() as threads:
            inner = [each.result(SOON_S) for each in [threads.submit(w.of, late) for w in pair]]
        assert all(each is pair[n].of(late) for n, each in enumerate(inner))
        for worker in pair:
            worker.lose(j.held.epoch)
        assert [worker.of(late) for worker in pair] == [None, None]


def test_a_loss_ends_the_wait_for_a_build() -> None:
    """Its other members may never come."""
    with job() as j, ThreadPoolExecutor() as threads:
        worker = j.workers[j.holders[0]]
        waiting = threads.submit(worker.of, GroupView("late", (0, 1)))
        with j.cluster.changed:
            j.cluster.changed.wait_for(
                lambda: (j.holders[0], "late", j.held.epoch) in j.cluster.began
            )
        worker.lose(j.held.epoch)
        assert waiting.result(SOON_S) is None


def test_what_was_prepared_in_a_recovery_is_used_once_it_is_built() -> None:
    """Its epoch begins before that."""
    with job() as j, ThreadPoolExecutor() as threads:
        lost = j.holders[2]
        j.lose(lost)
        late = j.fresh()
        j.cluster.hanging_builds.add((late, "world"))
        j.build([*j.holders[:2], late])
        for worker in j.coming:
            j.workers[worker].enter(j.prepared)
        waiting = [threads.submit(j.workers[worker].of, WORLD) for worker in j.coming]
        with j.cluster.changed:
            j.cluster.hanging_builds.clear()
            j.cluster.changed.notify_all()
        assert all(each.result(SOON_S) is not None for each in waiting)
        assert j.workers[late].of(WORLD) is waiting[2].result()
        for worker in j.coming:
            j.workers[worker].reap()


def test_a_build_that_ends_after_it_was_dropped_is_freed() -> None:
    with job() as j:
        late = j.fresh()
        j.cluster.hanging_builds.add((late, "world"))
        j.build([*j.holders[:2], late])
        dropped = j.workers[late]._next
        assert dropped is not None
        j.drop()
        for worker in j.coming:
            j.workers[worker].reap()
        with j.cluster.changed:
            j.cluster.hanging_builds.clear()
            j.cluster.changed.notify_all()
        dropped.await_end(SOON_S)
        assert dropped.by_name["world"].state is GenerationState.FREED
        for worker in j.coming:
            j.workers[worker].reap()


def test_what_cannot_be_freed_does_not_keep_the_rest() -> None:
    """A worker that commits must not fail by what it no longer uses."""
    with job() as j:
        worker = j.holders[0]
        first = j.workers[worker].live("world")
        assert first is not None

        def close() -> None:
            raise RuntimeError("the device is gone")

        first.inner.close = close  # type: ignore[method-assign]
        j.build([j.holders[0], j.fresh(), j.fresh()])
        pair = j.workers[worker].live("pair")
        assert pair is not None
        j.switch()
        assert first.state is GenerationState.FREED
        assert pair.state is GenerationState.FREED


def test_without_a_preparation_the_reason_is_named() -> None:
    with job() as j:
        worker = j.holders[0]
        made = j.workers[worker]
        assert not made.wait(SOON_S)
        assert made.refusal == "nothing is prepared"
        j.build(j.holders)
        assert j.abort(worker) == ()
        assert not made.wait(SOON_S)
        assert made.refusal == "a member is lost"


def never() -> bool:
    return False


def other_plan(j: Job, joiner: str) -> Membership:
    """Another plan for the epoch that is prepared, with another joiner."""
    members = (*j.prepared.members[:2], Member(worker=joiner, host=joiner, address=""))
    return Membership(epoch=j.prepared.epoch, members=members)


def test_two_plans_for_one_epoch_are_not_confused() -> None:
    """A dropped plan and the next one have the same number."""
    with job() as j:
        worker = j.workers[j.holders[0]]
        j.build([*j.holders[:2], j.fresh()])
        assert worker.wait(SOON_S)
        other = other_plan(j, "other")
        worker.discard(other)
        with pytest.raises(IllegalTransition, match="those of another membership are prepared"):
            worker.switch(other)
        j.switch()

        j.build([*j.holders[:2], j.fresh()])
        assert worker.wait(SOON_S)
        dropped = worker._next
        assert dropped is not None
        worker.enter(other_plan(j, "another"))
        assert dropped.by_name["world"].state is GenerationState.DISCARDED


def test_after_a_switch_that_fails_nothing_is_used() -> None:
    """The other members have switched. What this worker kept they do not have, so it would build
    another set of groups in the recovery, and they would wait for each other."""
    with job() as j:
        worker = j.workers[j.holders[0]]
        pair = worker.live("pair")
        assert pair is not None
        j.cluster.failing_builds.add((j.holders[0], "world"))
        j.build([*j.holders[:2], j.fresh()])
        assert not worker.wait(SOON_S)
        assert "unhandled system error" in worker.follow(j.prepared, never)
        assert worker.await_aborts(SOON_S) == ()
        assert pair.state is GenerationState.ABORTED
        assert worker.of(PAIR) is None

        j.cluster.failing_builds.clear()
        again = Membership(epoch=j.epoch + 1, members=j.prepared.members)
        worker.prepare(VIEWS, again)
        assert worker._next is not None
        assert worker._next.by_name.keys() == {"world", "pair"}


@pytest.mark.timeout(BUILT_S / 2)
def test_a_switch_does_not_wait_for_a_build_once_a_member_is_lost() -> None:
    with job() as j:
        worker = j.workers[j.holders[0]]
        j.cluster.hanging_builds.add((j.holders[0], "world"))
        j.build([*j.holders[:2], j.fresh()])
        assert "still being built" in worker.follow(j.prepared, lambda: True)


def test_a_switch_without_a_preparation_returns_the_reason() -> None:
    with job() as j:
        later = Membership(epoch=9, members=j.held.members)
        assert "nothing is prepared" in j.workers[j.holders[0]].follow(later, never)


def test_a_recovery_waits_only_a_little_for_an_earlier_build() -> None:
    """The job stands still, and a hung build would add its whole patience."""
    with job() as j:
        limits = GenerationLimits(3600, SHORT_S)
        hurries = Generations(FakeKind(j.cluster, "hurries"), limits=limits)
        j.workers["hurries"] = hurries
        j.cluster.hanging_builds.add(("hurries", "world"))
        holders = ["hurries", *j.holders[1:]]
        j.build(holders)
        with j.cluster.changed:
            j.cluster.changed.wait_for(lambda: ("hurries", "world", j.epoch) in j.cluster.began)
        j.drop()
        later = Membership(epoch=j.epoch + 1, members=j.prepared.members)
        built: queue.SimpleQueue[str] = queue.SimpleQueue()
        hurries.prepare([PAIR], later, built.put, when=BuildTime.ALONE)
        j.workers[j.holders[1]].prepare([PAIR], later, when=BuildTime.ALONE)
        assert built.get(timeout=SOON_S) == ""


def test_what_is_built_at_a_switch_is_built_once_the_groups_before_are_freed() -> None:
    """The device may have no room for both. Other members may use them until they switch. Groups
    whose members stay are kept."""
    with job() as j:
        first = j.workers[j.holders[0]]
        world, pair = first.live("world"), first.live("pair")
        assert world is not None
        built = set(j.cluster.began)
        j.build([*j.holders[:2], j.fresh()], BuildTime.AT_SWITCH)
        for worker in j.coming:
            assert j.workers[worker].wait(SOON_S)
        assert j.cluster.began == built

        first.switch(j.prepared)
        with j.cluster.changed:
            j.cluster.changed.wait_for(lambda: (j.coming[0], "world", j.epoch) in j.cluster.began)
        before = world.state
        for worker in j.coming[1:]:
            j.workers[worker].switch(j.prepared)
        assert first.of(WORLD) is not None
        assert (before, world.state) == (GenerationState.RETIRED, GenerationState.FREED)
        j.workers[j.holders[2]].leave()
        j.holders, j.held = j.coming, j.prepared
        j.sums()
        assert first.live("pair") is pair
        assert not j.cluster.overlapped


def test_what_is_to_be_built_at_a_switch_can_be_dropped() -> None:
    """Nothing was built, and the next move builds beside training."""
    with job() as j:
        built = set(j.cluster.began)
        j.build([*j.holders[:2], j.fresh()], BuildTime.AT_SWITCH)
        dropped = [j.workers[worker]._next for worker in j.coming]
        j.drop()
        for each in dropped:
            assert each is not None
            each.await_end(SOON_S)
            assert not each.running
        assert j.cluster.began == built
        j.sums()
        j.build([*j.holders[:2], j.fresh()])
        j.switch()


def test_a_build_at_a_switch_comes_after_one_that_was_given_up() -> None:
    """Two at once may wait for each other, so that no member switches earlier."""
    with job() as j:
        slow = given_up(j)
        j.build(j.coming, BuildTime.AT_SWITCH)
        assert not slow.wait(SHORT_S)
        j.cluster.release(("slow", "world"))
        j.switch()
        assert "slow" not in j.cluster.overlapped


def test_a_build_at_a_switch_that_fails_says_why() -> None:
    """The step is dropped then, and all groups are built anew."""
    with job() as j:
        worker = j.workers[j.holders[0]]
        j.build([*j.holders[:2], j.fresh()], BuildTime.AT_SWITCH)
        j.cluster.failing_builds.add((j.holders[0], "world"))
        assert worker.follow(j.prepared, never) == ""
        assert worker.of(WORLD) is None
        assert "unhandled system error" in worker.failure("world")


def test_a_build_at_a_switch_that_takes_too_long_is_given_up() -> None:
    """All ranks stand still. What is built later nevertheless is freed."""
    with job() as j:
        limits = GenerationLimits(at_switch_s=SHORT_S)
        slow = j.workers["slow"] = Generations(FakeKind(j.cluster, "slow"), limits=limits)
        j.cluster.hanging_inits.add(("slow", "world"))
        j.build([*j.holders[:2], "slow"], BuildTime.AT_SWITCH)
        for worker in j.coming:
            assert j.workers[worker].follow(j.prepared, never) == ""
        late = slow._unfinished[0]
        generation = slow.live("world")
        assert generation is not None
        assert slow.of(WORLD) is None
        assert slow.failure("world") == f"it was not built within {SHORT_S:g} s"

        slow.lose(j.prepared.epoch)
        slow.leave()
        slow.reap()
        assert all(j.workers[worker].of(WORLD) for worker in j.holders[:2])
        built = j.cluster.open
        j.cluster.release(("slow", "world"))
        late.await_end(SOON_S)
        assert generation.state is GenerationState.FREED
        assert j.cluster.open == built, "what was built late is closed at once"


def test_a_group_that_is_being_aborted_is_not_freed_beside_that() -> None:
    """A member is lost while the others build at a switch."""
    with job() as j:
        worker, late = j.workers[j.holders[0]], j.fresh()
        world = worker.live("world")
        assert world is not None
        j.build([*j.holders[:2], late], BuildTime.AT_SWITCH)
        for name in j.coming[:2]:
            assert j.workers[name].follow(j.prepared, never) == ""
        building = worker._unfinished[-1]
        j.cluster.hanging_aborts.add((j.holders[0], "world"))
        worker.lose(j.prepared.epoch)
        assert j.workers[late].follow(j.prepared, never) == ""
        assert j.workers[j.holders[1]].of(WORLD) is not None
        building.await_end(SOON_S)
        assert not building.hung
        assert world.state is GenerationState.ABORTED


def test_a_loss_after_a_switch_ends_the_wait_for_what_is_built_there() -> None:
    with job() as j, ThreadPoolExecutor() as threads:
        worker = j.workers[j.holders[0]]
        j.build([*j.holders[:2], j.fresh()], BuildTime.AT_SWITCH)
        assert worker.wait(SOON_S)
        worker.switch(j.prepared)
        waiting = threads.submit(worker.of, WORLD)
        with j.cluster.changed:
            j.cluster.changed.wait_for(lambda: (j.holders[0], "world", j.epoch) in j.cluster.began)
        worker.lose(j.prepared.epoch)
        assert waiting.result(SOON_S) is None


class Crowded(FakeKind):
    """Of a worker whose device has no room for two sets of communicators."""

    def build(self, request: GroupRequest) -> FakeNccl:
        if request.when is BuildTime.BESIDE:
            raise CannotBuildBeside("no room")
        return super().build(request)


def test_a_worker_that_lacks_room_beside_training_reports_it_until_it_has_switched() -> None:
    """Then it is tried again: what took the room may be gone."""
    with job() as j:
        crowded = j.workers["crowded"] = Generations(Crowded(j.cluster, "crowded"))
        j.build([*j.holders[:2], "crowded"])
        assert not crowded.wait(SOON_S)
        j.drop()
        assert crowded.beside.obstacle == "no room"
        j.build(j.coming, BuildTime.AT_SWITCH)
        j.switch()
        assert crowded.beside.obstacle == ""
        assert not any(j.workers[worker].beside.obstacle for worker in j.holders[:2])


def test_after_each_failure_twice_as_many_moves_build_at_the_switch() -> None:
    found, beside = [], BesideBuilds()
    for _ in range(4):
        beside.failed("a stall")
        beside.failed("the same one")
        count = 0
        while beside.obstacle:
            assert beside.obstacle == "a stall"
            beside.switched()
            count += 1
        found.append(count)

    assert found == [1, 2, 4, 8]


def test_an_operator_may_have_all_moves_build_at_the_switch() -> None:
    beside = BesideBuilds()
    beside.never("TMD_BUILD=switch")
    for _ in range(100):
        beside.failed("a stall")
        beside.switched()

    assert beside.obstacle == "TMD_BUILD=switch"


def test_the_time_for_a_build_at_a_switch_begins_when_all_have_come() -> None:
    """A joiner that gets the whole state at the switch comes later."""
    with job() as j, ThreadPoolExecutor() as threads:
        limits = GenerationLimits(at_switch_s=SHORT_S)
        quick = j.workers["quick"] = Generations(FakeKind(j.cluster, "quick"), limits=limits)
        late = j.fresh()
        j.build(["quick", j.holders[1], late], BuildTime.AT_SWITCH)
        for worker in j.coming[:2]:
            assert j.workers[worker].follow(j.prepared, never) == ""
        waiting = threads.submit(quick.of, WORLD)
        with pytest.raises(TimeoutError):
            waiting.result(5 * SHORT_S)
        assert j.workers[late].follow(j.prepared, never) == ""
        assert waiting.result(SOON_S) is not None


def test_what_is_prepared_is_dropped_whatever_it_is_for() -> None:
    """A worker that goes back to the pool does not know which plan was the last."""
    with job() as j:
        worker = j.workers[j.holders[0]]
        j.cluster.hanging_builds.add((j.holders[0], "world"))
        j.build([*j.holders[:2], j.fresh()])
        worker.discard()
        assert worker.refusal == "the preparation was dropped"


def test_an_orderly_end_aborts_only_what_still_runs() -> None:
    """Its peers may still need the results of what has ended here."""
    with job() as j:
        ends = j.holders[0]
        world = j.workers[ends].live("world")
        assert world is not None
        world.inner.backend.allreduce([torch.ones(1)])
        assert j.workers[ends].close(SOON_S, ["pair"]) == ()
        assert j.cluster.aborts == 1, "of the group of all"
        assert j.cluster.open == 3 + 2 - 2


def test_a_generation_that_is_replaced_before_its_first_use_is_not_used() -> None:
    """Another thread may be about to use it."""
    with job() as j:
        worker = j.workers[j.holders[0]]
        j.build([*j.holders[:2], j.fresh()])
        assert worker.wait(SOON_S)
        worker.enter(j.prepared)
        ready = worker.live("world")
        assert ready is not None
        worker.leave()
        assert ready.use() is None
        worker.reap()
        assert ready.state is GenerationState.FREED


def test_destroying_a_group_frees_no_other() -> None:
    """Other members may still use what this worker has replaced."""
    with job() as j:
        worker = j.workers[j.holders[0]]
        replaced, pair = worker.live("world"), worker.live("pair")
        assert replaced is not None
        assert pair is not None
        j.build([*j.holders[:2], j.fresh()])
        assert worker.wait(SOON_S)
        worker.switch(j.prepared)
        worker.destroy_group("pair")
        assert pair.state is GenerationState.FREED
        assert replaced.state is GenerationState.RETIRED


def test_a_thread_that_the_system_refuses_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The move is dropped; nothing is raised in the thread that trains."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with job() as j:
        worker = j.workers[j.holders[0]]
        refusals: list[str] = []
        later = Membership(epoch=9, members=(*j.held.members[1:], j.held.members[0]))
        with monkeypatch.context() as refused:
            refused.setattr(threading.Thread, "start", start)
            worker.prepare(VIEWS, later, refusals.append)
        assert refusals == [worker.refusal]
        assert "can't start new thread" in worker.refusal


def test_a_lost_generation_whose_abort_gets_no_thread_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing would end its operations."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with job() as j:
        hung: list[tuple[str, ...]] = []
        alone = Generations(FakeKind(j.cluster, "alone"), on_hung=hung.append)
        members = (Member(worker="alone", host="alone", address=""),)
        alone.enter(Membership(epoch=1, members=members))
        assert alone.of(GroupView("own", (0,))) is not None
        with monkeypatch.context() as refused:
            refused.setattr(threading.Thread, "start", start)
            alone.lose(1)
        assert hung == [("own",)]


class Life(RuleBasedStateMachine):
    """Moves, losses, builds that fail, hang, are slow or lose a member, and aborts that hang, in
    any order; the job always goes on."""

    @initialize()
    def begin(self) -> None:
        self.job = Job()

    def with_fresh(self, rank: int) -> list[str]:
        """The holders once ``rank`` has moved to a new worker."""
        return [self.job.fresh() if r == rank else w for r, w in enumerate(self.job.holders)]

    def recover(self) -> None:
        """New workers take the ranks of the dead ones."""
        job = self.job
        job.build([job.fresh() if w in job.cluster.dead else w for w in job.holders])
        job.switch()

    def began(self, worker: str) -> None:
        """Wait until ``worker`` is inside the build."""
        job = self.job
        with job.cluster.changed:
            place = (worker, "world", job.epoch)
            assert job.cluster.changed.wait_for(lambda: place in job.cluster.began, SOON_S)

    @rule(rank=st.integers(0, 2))
    def moves(self, rank: int) -> None:
        self.job.build(self.with_fresh(rank))
        self.job.sums()
        self.job.switch()

    @rule(rank=st.integers(0, 2))
    def moves_and_builds_at_the_switch(self, rank: int) -> None:
        self.job.build(self.with_fresh(rank), BuildTime.AT_SWITCH)
        self.job.sums()
        self.job.switch()

    @rule(rank=st.integers(0, 2), who=st.integers(0, 2))
    def loses_one_before_a_switch_that_builds(self, rank: int, who: int) -> None:
        """Nothing of the move is used."""
        job, holders = self.job, self.with_fresh(rank)
        job.build(holders, BuildTime.AT_SWITCH)
        lost = job.holders[who]
        assert all(handle.wait() for *_, handle in job.lose(lost))  # type: ignore[attr-defined]
        job.workers[holders[rank]].discard(job.prepared)
        self.recover()

    @rule(rank=st.integers(0, 2), who=st.integers(0, 2))
    def moves_slowly(self, rank: int, who: int) -> None:
        """The build of one worker takes long: training goes on, and the move comes later."""
        job, holders = self.job, self.with_fresh(rank)
        slow = (holders[who], "world")
        job.cluster.hanging_builds.add(slow)
        job.build(holders)
        self.began(holders[who])
        for _ in range(3):
            job.sums()
        assert not job.workers[holders[who]].wait(0.0)
        job.cluster.release(slow)
        job.switch()

    @rule(rank=st.integers(0, 2), who=st.integers(0, 2), hangs=st.booleans())
    def cannot_move(self, rank: int, who: int, hangs: bool) -> None:
        """The build of one worker fails or hangs: the move is dropped."""
        job, holders = self.job, self.with_fresh(rank)
        faults = job.cluster.hanging_builds if hangs else job.cluster.failing_builds
        fault = (holders[who], "world")
        faults.add(fault)
        job.build(holders)
        job.sums()
        assert not job.workers[holders[who]].wait(SHORT_S if hangs else SOON_S)
        job.drop()
        for worker in holders:
            job.workers[worker].reap()
        faults.discard(fault)

    @rule(rank=st.integers(0, 2))
    def lose(self, rank: int) -> None:
        job = self.job
        lost = job.holders[rank]
        assert all(handle.wait() for *_, handle in job.lose(lost))  # type: ignore[attr-defined]
        self.recover()

    @rule(rank=st.integers(0, 2), who=st.integers(0, 2))
    def loses_one_during_a_build(self, rank: int, who: int) -> None:
        """A holder or the joiner dies while a move is prepared, in which the others wait for it.

        The death of the joiner breaks no step; that of a holder does.
        """
        job, holders = self.job, self.with_fresh(rank)
        joiner, dies = holders[rank], holders[who]
        job.cluster.hanging_builds.add((dies, "world"))
        job.build(holders)
        self.began(dies)
        if dies == joiner:
            job.cluster.lose(joiner)
            job.drop()
            return
        assert all(handle.wait() for *_, handle in job.lose(dies))  # type: ignore[attr-defined]
        for worker in {*holders} - {joiner, dies}:
            assert job.workers[worker].refusal == "a member is lost"
        job.workers[joiner].discard(job.prepared)
        self.recover()

    @rule(rank=st.integers(0, 2), offset=st.integers(1, 2))
    def loses_one_whose_loss_hangs_an_abort(self, rank: int, offset: int) -> None:
        """A survivor cannot end its group: it ends itself, and two ranks get new workers."""
        job = self.job
        lost, stuck = job.holders[rank], job.holders[(rank + offset) % 3]
        job.cluster.lose(lost)
        broken = job.launch(lost, stuck)
        job.cluster.hanging_aborts.add((stuck, "world"))
        assert job.abort(stuck, SHORT_S) == ("world",)
        job.cluster.lose(stuck)
        (survivor,) = (w for w in job.holders if w not in (lost, stuck))
        assert job.abort(survivor) == ()
        assert all(handle.wait() for *_, handle in broken)  # type: ignore[attr-defined]
        self.recover()

    @invariant()
    def computes(self) -> None:
        if hasattr(self, "job"):
            self.job.sums()

    def teardown(self) -> None:
        if hasattr(self, "job"):
            self.job.cluster.end()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)
