"""The hooks of a managed job, as far as they work without other workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec import structs
from torch import nn

from tests.fabric.circle import KEY, member
from tests.fabric.fake_nccl import Cluster, FakeKind
from tests.trainer.contexts import FAST
from tmd.core.planning.directives import Directive, Finish, Hold, Resume, Sync, Train
from tmd.core.values.model import Activity, Member, Membership
from tmd.fabric import Fabric, GroupView
from tmd.fabric.generations.generations import Generations
from tmd.testing.clients import worker_status
from tmd.trainer.session.hooks import Interrupted, VoteOutcome
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.replicas import all_alike
from tmd.trainer.state.state import Registry
from tmd.trainer.worker.coordinator import Coordinator

NO_STATE: Any = None
ALONE = Membership(epoch=1, members=(Member("h1/j/0", "h1", "h1:1"),))


def test_a_second_step_in_the_batch_of_a_broken_one_is_interrupted() -> None:
    """The script continues to its next boundary; a vote there would end a healthy worker."""
    coordinator = Coordinator(worker_status("h1/j/0", activity=Activity.STUCK))

    with pytest.raises(Interrupted):
        coordinator.vote(NO_STATE)


@pytest.mark.parametrize("activity", [Activity.STARTING, Activity.STANDBY])
def test_a_step_of_a_worker_without_a_rank_is_not_committed(activity: Activity) -> None:
    """Its optimizer runs, so that a shadow iteration warms everything up."""
    coordinator = Coordinator(worker_status("h1/j/0", activity=activity))

    assert coordinator.vote(NO_STATE) is VoteOutcome.SHADOW


class Ordering:
    """An agent whose daemon has given one directive."""

    def __init__(self, directive: Directive) -> None:
        self.directive = directive

    def start(self) -> None:
        """It is connected."""

    def close(self) -> None:
        """It holds nothing."""

    def tell(self) -> None:
        """Nobody listens."""

    def wait_until(self, wanted: Callable[[Directive], bool]) -> Directive:
        assert wanted(self.directive)
        return self.directive


@contextmanager
def training(fabric: Fabric) -> Iterator[Coordinator]:
    """The only rank of a job, in its first epoch."""
    alone = Membership(epoch=1, members=(member(fabric),))
    agent: Any = Ordering(Train(membership=alone, rank=0))
    coordinator = Coordinator(worker_status(fabric.worker, world_size=1))
    coordinator.start(agent, fabric, FAST, one_run=False)
    try:
        yield coordinator
    finally:
        coordinator.close()
        fabric.close()


@pytest.mark.parametrize(
    "kind", [Hold("plan", 1), Resume("plan", ALONE, 0), Sync("plan", ALONE, 0, 0, ())]
)
def test_a_worker_whose_first_directive_is_of_a_recovery_does_not_wait_for_good(
    kind: Directive,
) -> None:
    """It has a rank, and another one was lost before this worker heard of it: its daemon was away.
    The others end in the same way, and the job forms anew."""
    fabric, agent = Fabric("h1/j/0", KEY), Ordering(kind)
    coordinator = Coordinator(worker_status(fabric.worker))
    try:
        with pytest.raises(RuntimeError, match="a rank was lost during set-up: start the job"):
            coordinator.start(agent, fabric, FAST, one_run=False)  # type: ignore[arg-type]
    finally:
        coordinator.close()
        fabric.close()


@pytest.mark.parametrize(("epoch", "halts"), [(0, True), (1, True), (2, False)])
def test_a_halt_that_came_before_the_epoch_was_entered_is_obeyed(epoch: int, halts: bool) -> None:
    """When it came, the worker was still in the epoch before, which it has poisoned in vain."""
    registry, fabric = Registry({"model": nn.Linear(1, 1)}), Fabric("h1/j/0", KEY)
    with training(fabric) as coordinator:
        coordinator.registered(registry, [], LocalState(registry), all_alike(1), 0)
        coordinator._context.state.resync.broadcast(1)
        coordinator._agent.directive = Hold("plan", epoch)  # type: ignore[misc]

        assert coordinator._may_train() != halts
        assert fabric.poisoned == halts


def test_a_worker_whose_first_directive_ends_the_job_leaves_in_peace() -> None:
    """The script of another rank had nothing to do."""
    fabric, agent = Fabric("h1/j/0", KEY), Ordering(Finish())
    coordinator = Coordinator(worker_status(fabric.worker))
    try:
        with pytest.raises(SystemExit) as ended:
            coordinator.start(agent, fabric, FAST, one_run=False)  # type: ignore[arg-type]
    finally:
        coordinator.close()
        fabric.close()

    assert ended.value.code == 0


def test_the_first_commit_of_an_epoch_frees_the_groups_of_the_one_before() -> None:
    """Other ranks may use them until then. Each change of members would cost memory for ever."""
    cluster, fabric, view = Cluster(), Fabric("h1/j/0", KEY), GroupView("0", (0,))
    fabric.pass_to(Generations(FakeKind(cluster, fabric.worker)))
    local = LocalState(Registry({"model": nn.Linear(1, 1)}))
    with training(fabric) as coordinator:
        fabric.generations.of(view)
        fabric.enter(Membership(epoch=2, members=(member(fabric),)), 0)
        fabric.generations.of(view)
        before = cluster.open
        coordinator.committed(local, loss=1.0, seconds=0.1)

        assert (before, cluster.open) == (2, 1)
        assert fabric.generations.of(view) is not None, "the one in use stays"


def test_a_decision_that_is_outdated_by_the_next_batch_is_not_carried_out() -> None:
    """The script may have run for long since the vote, and another rank may be lost meanwhile."""
    registry, fabric = Registry({"model": nn.Linear(1, 1)}), Fabric("h1/j/0", KEY)
    local = LocalState(registry)
    with training(fabric) as coordinator:
        coordinator.registered(registry, [], local, all_alike(1), 0)
        recovery, agent = coordinator._parts.recovery, coordinator._agent
        alone = Membership(epoch=2, members=(member(fabric),))
        first = Sync(plan="first", membership=alone, rank=0, resume=1, moves=())
        second = structs.replace(first, plan="second")
        fabric.poison("a loss")
        agent.directive = Hold(plan="first", epoch=1)  # type: ignore[misc]
        recovery.halt(undecided=True)
        agent.directive = first  # type: ignore[misc]
        committed = recovery.wait_for_outcome()
        coordinator.advance(local)
        agent.directive = second  # type: ignore[misc]
        recovery.settle()

        assert committed
        assert coordinator.status.activity is Activity.SYNCED
        assert coordinator.status.plan == "second"


def test_nothing_reads_the_parameters_while_an_evaluation_may_exchange_them() -> None:
    """For a joiner or a snapshot; within a training step it goes on."""
    registry = Registry({"model": nn.Linear(1, 1)})
    with training(Fabric("h1/j/0", KEY)) as coordinator:
        coordinator.registered(registry, [], LocalState(registry), all_alike(1), 0)
        context = coordinator._context
        assert context is not None
        versions = []
        for trains in (True, False):
            context.window.open(7)
            coordinator.begun(trains=trains)
            versions.append(context.window.version)

    assert versions == [7, None]
