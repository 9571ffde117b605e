"""The real core against modelled workers: no order of events may lose or repeat a step."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.core.machine import Machine
from tests.core.proof import thorough
from tests.core.simulation import Simulation
from tmd.core.values.model import Activity, JobState, Phase
from tmd.core.values.snapshots import Rollback


class Cluster(Machine):
    """The leader decides on all reports, and at once; directives are late."""

    def simulated(self) -> Simulation:
        return Simulation(ranks=3, standbys=2, hot=self.hot)

    @rule()
    def leader_looks(self) -> None:
        self.sim.turn()

    @rule()
    def leader_has_waited(self) -> None:
        self.sim.turn(age=1.0)

    @rule()
    def deadline_passes(self) -> None:
        self.sim.turn(age=100.0)

    @rule(data=st.data())
    def order_arrives(self, data: st.DataObject) -> None:
        self.sim.deliver(self.pick(data))

    @rule(rounds=st.integers(1, 4))
    def everything_is_heard(self, rounds: int) -> None:
        self.sim.settle(rounds)


class ShadowCluster(Cluster):
    """The same with joiners that shadow before they take over, and a hot standby."""

    hot = 1


class ElasticCluster(ShadowCluster):
    """The same without standbys, unless some come later, and with a script that lets ranks be
    adopted."""

    came = 0

    def simulated(self) -> Simulation:
        sim = Simulation(ranks=3, standbys=0, hot=self.hot, elastic=True)
        for _ in range(2):  # no rank is adopted in the first steps
            sim.settle(4)
            sim.step()
        return sim

    def lost(self) -> None:
        """Nobody comes at once."""

    @precondition(lambda self: self.came < 2)
    @rule()
    def standby_comes(self) -> None:
        self.came += 1
        self.sim.add_standby(f"new{self.came}")

    def teardown(self) -> None:
        """With as many standbys as losses the job has grown back in the end."""
        super().teardown()
        for _ in range(12):
            self.sim.settle(8)
            self.sim.step()
        record = self.sim.record
        if self.came >= self.kills and record is not None and record.state is JobState.RUNNING:
            assert record.membership.adopted == {}
        self.sim.check()


THOROUGH = thorough("simulation", 40)
Cluster.TestCase.settings = ShadowCluster.TestCase.settings = THOROUGH
ElasticCluster.TestCase.settings = THOROUGH
TestElasticCluster = ElasticCluster.TestCase
TestCluster = Cluster.TestCase
TestShadowCluster = ShadowCluster.TestCase


def begun(
    ranks: int, standbys: int, *, hot: int | None = None, alike: bool = True, steps: int = 0
) -> Simulation:
    """A job whose record all workers have received, after some steps."""
    sim = Simulation(ranks, standbys, hot=hot, alike=alike)
    sim.settle(2)
    commit(sim, steps)
    return sim


def commit(sim: Simulation, steps: int = 1) -> None:
    """Some steps, each followed by enough time to deliver and to obey."""
    for _ in range(steps):
        sim.step()
        sim.settle(3)


def lose(sim: Simulation, *workers: str) -> None:
    """Lose all of them at once, then allow enough time to recover."""
    for worker in workers:
        sim.kill(worker)
    sim.settle()


def test_a_joiner_in_step_takes_over_in_band_and_a_hot_standby_copies_nothing() -> None:
    """The planned path by live shadow, then a loss."""
    sim = begun(2, 1, hot=1, steps=3)
    assert sim.workers["w2"].status.activity is Activity.IN_STEP
    lose(sim, "w0")
    recovered = sim.plan.phase
    assert recovered is Phase.RESUME
    assert sim.workers["w2"].status.rank == 0
    assert sim.workers["w2"].state == (0, 1, 2)

    sim.add_standby("w3")
    sim.settle(3)
    commit(sim, 3)
    sim.drain("h2")
    sim.settle(3)
    commit(sim, 4)

    assert sim.plan.phase is Phase.DONE
    assert sim.workers["w3"].status.rank == 0


def test_a_drained_host_hands_over_and_returns_to_the_pool() -> None:
    """The whole planned path, in order."""
    sim = begun(2, 1)
    sim.step()
    sim.drain("h0")
    sim.settle(3)
    before = sim.plan.phase
    commit(sim, 2)

    assert (before, sim.plan.phase) == (Phase.READY, Phase.DONE)
    assert sim.workers["w2"].status.rank == 0
    assert sim.workers["w0"].status.activity is Activity.STANDBY
    assert [m.phase for m in sim.plan.timeline] == [
        Phase.PREPARE,
        Phase.READY,
        Phase.SWITCH,
        Phase.DONE,
    ]


def test_a_lost_rank_is_taken_over_and_one_step_is_repeated_at_most() -> None:
    """Kill in the vote: a rank that knows of the commit decides for all."""
    sim = begun(3, 1)
    sim.step()
    sim.step(aware={1})
    lose(sim, "w0")

    assert sim.plan.resume == 2
    assert sim.step()
    sim.settle()
    assert sim.plan.phase is Phase.DONE
    assert {w.status.step for w in sim.workers.values() if w.alive} == {3}


def test_a_rewritten_plan_never_falls_below_a_step_that_a_worker_rolled_forward_to() -> None:
    """The only rank that knew of the commit dies after the others were ordered to roll forward."""
    sim = begun(3, 2)
    sim.step()
    sim.step(aware={0})
    sim.kill("w1")
    for _ in range(8):
        for name in ("w0", "w2"):
            sim.boundary(name)
            if sim.record is None or sim.record.plan is None or sim.record.plan.resume is None:
                sim.deliver(name)
                sim.publish(name)
        sim.turn()
    assert sim.plan.resume == 2
    lose(sim, "w0")

    assert sim.plan.floor == 2
    assert {w.status.step for w in sim.workers.values() if w.alive and w.state} == {2}


def test_a_job_on_one_host_can_be_drained() -> None:
    """All old members leave: only they and their joiners know that the vote switched."""
    sim = begun(1, 1)
    sim.step()
    sim.drain("h0")
    sim.settle(3)
    commit(sim, 2)

    assert sim.plan.phase is Phase.DONE
    assert sim.record.membership.members[0].worker == "w1"


def test_a_unique_state_is_never_taken_from_another_rank() -> None:
    """The job fails with a sentence, despite a standby and a survivor."""
    sim = begun(2, 1, alike=False, steps=1)
    lose(sim, "w0")

    assert sim.record is not None
    assert sim.record.state is JobState.FAILED
    assert "the state of rank 0 is lost without a replica" in sim.record.detail
    assert sim.workers["w2"].state is None


def sharded(ranks: int = 3, standbys: int = 1, *, hot: int | None = None) -> Simulation:
    """Each state is unique; two steps, a snapshot, and three more steps."""
    sim = begun(ranks, standbys, hot=hot, alike=False, steps=2)
    sim.snapshot()
    commit(sim, 3)
    return sim


def test_a_unique_state_is_restored_from_the_newest_snapshot() -> None:
    """All ranks return, report how far, and repeat the steps; the keeper has the joiner's copy."""
    sim = sharded()
    lose(sim, "w0")

    assert sim.plan.rollback == Rollback(2, 3)
    assert sim.plan.resume == 2
    assert {w.status.step for w in sim.workers.values() if w.alive} == {2}
    assert sim.step()
    sim.settle(3)
    assert sim.plan.phase is Phase.DONE
    assert sim.plan.how == "rolled back to step 2, 3 steps are repeated"


def test_a_torn_snapshot_falls_back_to_the_previous_one() -> None:
    """The lost rank's copy had not yet reached its keeper."""
    sim = sharded()
    sim.snapshot(aware={1, 2})
    commit(sim)
    lose(sim, "w0")

    assert sim.plan.rollback == Rollback(2, 4)


def test_a_stored_snapshot_counts_before_its_vote() -> None:
    """The leader decides on the copies that exist."""
    sim = sharded()
    sim.snapshot(aware={0, 1, 2})
    commit(sim)
    lose(sim, "w0")

    assert sim.plan.rollback == Rollback(5, 1)


def test_a_state_is_lost_together_with_its_keeper() -> None:
    """Rank 0's copies were with rank 1: the job fails with a sentence."""
    sim = sharded(standbys=2)
    lose(sim, "w0", "w1")

    assert sim.record is not None
    assert sim.record.state is JobState.FAILED
    assert "the state of rank 0" in sim.record.detail
    assert "or a complete snapshot" in sim.record.detail


def test_a_keeper_that_dies_once_the_joiner_has_the_copy_costs_nothing_more() -> None:
    """A fetched copy is a copy like any other."""
    sim = sharded(standbys=2)
    sim.kill("w0")
    for _ in range(6):
        if sim.workers["w3"].status.activity is Activity.SYNCED:
            break
        for name in sim.workers:
            sim.boundary(name)
            sim.deliver(name)
            sim.publish(name)
        sim.turn(age=1.0)
    assert sim.workers["w3"].status.rank == 0
    lose(sim, "w1")

    assert sim.record is not None
    assert sim.record.state is JobState.RUNNING
    assert [p.rollback for p in sim.plans] == [Rollback(2, 3), Rollback(2, 0)]
    assert sim.step()


def test_the_job_holds_for_a_standby_before_all_ranks_roll_back() -> None:
    """No rank is restored before there is a standby."""
    sim = sharded(standbys=0)
    lose(sim, "w0")
    assert sim.record is not None
    assert sim.record.detail == "no standby for rank 0: the job has no other standby"
    assert sim.workers["w1"].status.step == 5
    sim.add_standby("w9")
    sim.settle()

    assert sim.plan.rollback == Rollback(2, 3)
    assert sim.step()


def test_a_hot_standby_makes_a_rollback_unnecessary() -> None:
    """The latest state still exists."""
    sim = sharded(hot=1)
    assert sim.workers["w3"].status.activity is Activity.IN_STEP
    lose(sim, "w2")

    assert sim.plan.rollback is None
    assert sim.plan.resume == 5


def test_a_shadow_of_another_rank_drops_its_state_in_a_rollback() -> None:
    """It fetches a copy of its new rank's state."""
    sim = sharded(standbys=2, hot=1)
    follower = next(w for w in sim.workers.values() if w.life is not None)
    assert follower.life is not None
    assert follower.life.directive.plays == 2
    lose(sim, "w0")

    assert sim.plan.rollback == Rollback(2, 3)
    assert follower.life is None or follower.life.state is None or len(follower.life.state) <= 2


class SnapshotCluster(Cluster):
    """Each state is unique, and snapshots are taken, complete or torn."""

    def simulated(self) -> Simulation:
        return Simulation(ranks=3, standbys=2, alike=False)

    @rule()
    def snapshot_is_whole(self) -> None:
        self.sim.snapshot()

    @rule(aware=st.sets(st.integers(0, 2)))
    def snapshot_is_torn(self, aware: set[int]) -> None:
        self.sim.snapshot(aware)

    def teardown(self) -> None:
        """In the end the job continues, unless it has reported a lost state."""
        if self.sim.record is not None and self.sim.record.state is JobState.FAILED:
            return
        self.sim.settle()
        if self.sim.record is None or self.sim.record.state is not JobState.FAILED:
            super().teardown()


SnapshotCluster.TestCase.settings = THOROUGH
TestSnapshotCluster = SnapshotCluster.TestCase


def test_a_unique_state_survives_in_its_hot_standby() -> None:
    """Only in that of the rank itself: the first one shadows the last rank."""
    for victim, survives in (("w1", True), ("w0", False)):
        sim = begun(2, 1, hot=1, alike=False, steps=3)
        assert sim.workers["w2"].status.activity is Activity.IN_STEP
        lose(sim, victim)

        assert sim.record is not None
        if not survives:
            assert sim.record.state is JobState.FAILED
            continue
        assert sim.plan.phase is Phase.RESUME
        assert sim.plan.moves[0].source is None
        assert sim.workers["w2"].status.rank == 1
        assert sim.workers["w2"].state == (0, 1, 2)


def test_a_joiner_that_dies_right_after_its_first_step_is_replaced_from_a_replica() -> None:
    """The leaver has the previous state, and the others have committed one more step: it cannot
    take its rank back, and no rank waits for it."""
    sim = Simulation(ranks=3, standbys=2)
    sim.drain("h0")
    for rounds in (3, 1):
        sim.step({0, 1, 2})
        sim.settle(rounds)
    committed = sim.step()
    sim.kill("w3")
    sim.drains = set()
    for _ in range(6):
        sim.settle()
        sim.check()

    assert committed
    assert sim.step()
    assert sim.record is not None
    assert sim.record.membership.rank_of("w4") == 0


def test_the_leaver_takes_the_rank_back_if_the_joiner_dies_in_the_vote() -> None:
    """The order to disarm comes between the vote and the boundary that carries out the switch: no
    worker may report being disarmed, and the leader learns that the vote has switched."""
    sim = begun(2, 1)
    sim.step()
    sim.drain("h0")
    sim.settle(3)
    sim.step()
    sim.kill("w2")
    sim.drains = set()
    sim.turn()
    for name in ("w0", "w1"):
        sim.deliver(name)
        sim.publish(name)
    disarming = sim.plan
    sim.turn()
    undecided = sim.plan
    sim.settle()

    assert disarming.phase is Phase.DISARM
    assert undecided == disarming
    planned, failover = sim.plans[-2:]
    assert [m.phase for m in planned.timeline] == [
        Phase.PREPARE,
        Phase.READY,
        Phase.DISARM,
        Phase.SWITCH,
        Phase.ABORTED,
    ]
    assert failover.dead == ("w2",)
    assert sim.workers["w0"].status.rank == 0
    assert sim.step()


def test_a_recovery_that_all_have_joined_is_done_though_another_rank_is_lost_at_once() -> None:
    """The next recovery starts from its membership: none of it was undone."""
    sim = begun(3, 2)
    lose(sim, "w0")
    assert sim.plan.phase is Phase.RESUME
    first = sim.plan
    lose(sim, "w1")

    assert sim.record is not None
    (done,) = sim.record.history
    assert (done.id, done.phase) == (first.id, Phase.DONE)
    assert done.outcome.startswith("overtaken by")
    assert sim.plan.old == first.new


@pytest.mark.parametrize("hot", [None, 1])
def test_an_elastic_job_goes_on_and_grows_back(hot: int | None) -> None:
    """With joiners that shadow; where they cannot, it goes on as it is."""
    sim = Simulation(ranks=4, standbys=0, hot=hot, elastic=True)
    sim.settle()
    for _ in range(3):
        assert sim.step()
        sim.settle()
    sim.kill("w0")
    sim.kill("w2")
    sim.settle()
    assert sim.record is not None
    assert sim.record.membership.adopted == {0: 1, 2: 3}
    for _ in range(3):
        assert sim.step()
        sim.settle()
    assert sim.shrunk > 0
    for name in ("new1", "new2"):
        sim.add_standby(name)
    for _ in range(12):
        sim.settle()
        assert sim.step()
    sim.settle()

    assert sim.record.membership.adopted == ({} if hot else {0: 1, 2: 3})
    sim.check()
