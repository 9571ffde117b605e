"""The real core against modelled workers: nothing that can happen may lose or repeat a step."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.core.simulation import Simulation
from tmd.core.model import Activity, JobState, Phase


class Cluster(RuleBasedStateMachine):
    """Kills, cuts, drains, late statuses and late orders in any order."""

    hot: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.sim = Simulation(ranks=3, standbys=2, hot=self.hot)
        self.kills = 0

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.sim.workers)))

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
    def status_arrives(self, data: st.DataObject) -> None:
        self.sim.publish(self.pick(data))

    @rule(data=st.data())
    def order_arrives(self, data: st.DataObject) -> None:
        self.sim.deliver(self.pick(data))

    @rule(data=st.data())
    def worker_reaches_boundary(self, data: st.DataObject) -> None:
        self.sim.boundary(self.pick(data))

    @rule()
    def step_commits(self) -> None:
        self.sim.step()

    @rule(aware=st.sets(st.integers(0, 2)))
    def vote_breaks(self, aware: set[int]) -> None:
        self.sim.step(aware)

    @rule()
    def link_breaks(self) -> None:
        self.sim.cut()

    @rule(data=st.data())
    def link_to_a_shadow_breaks(self, data: st.DataObject) -> None:
        self.sim.lose_life(self.pick(data))

    @precondition(lambda self: self.kills < 2)
    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        alive = sorted(n for n, w in self.sim.workers.items() if w.alive)
        holders = [w for w in self.sim.workers.values() if w.alive and w.state is not None]
        victim = data.draw(st.sampled_from(alive))
        if len([w for w in holders if w.name != victim]) >= 1:
            self.kills += 1
            self.sim.kill(victim)
            self.sim.add_standby(f"new{self.kills}")

    @rule(host=st.sampled_from(["h0", "h1", "h2"]))
    def drain(self, host: str) -> None:
        self.sim.drains = {host}
        self.sim.drain_count += 1

    @rule()
    def undrain(self) -> None:
        self.sim.drains = set()

    @rule(rounds=st.integers(1, 4))
    def everything_is_heard(self, rounds: int) -> None:
        self.sim.settle(rounds)

    @invariant()
    def holds(self) -> None:
        self.sim.check()

    def teardown(self) -> None:
        """In the end the job goes on: a step commits on every rank."""
        self.sim.drains = set()
        for _ in range(6):
            self.sim.settle()
            if self.sim.step():
                break
        else:
            raise AssertionError(f"the job does not go on: {self.sim.record}")
        self.sim.check()


class ShadowCluster(Cluster):
    """The same with joiners that follow before they take over, and a hot standby."""

    hot = 1


THOROUGH = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
Cluster.TestCase.settings = ShadowCluster.TestCase.settings = THOROUGH
TestCluster = Cluster.TestCase
TestShadowCluster = ShadowCluster.TestCase


def test_a_joiner_in_step_takes_over_in_band_and_a_hot_standby_copies_nothing() -> None:
    """The planned path by live shadow, then a loss."""
    sim = Simulation(ranks=2, standbys=1, hot=1)
    sim.settle(2)
    for _ in range(3):
        sim.step()
        sim.settle(3)
    assert sim.workers["w2"].status.activity is Activity.IN_STEP
    sim.kill("w0")
    sim.settle()
    assert sim.record is not None
    assert sim.record.plan is not None
    assert sim.record.plan.phase is Phase.RESUME
    assert sim.workers["w2"].status.rank == 0
    assert sim.workers["w2"].state == (0, 1, 2)

    sim.add_standby("w3")
    sim.settle(3)
    for _ in range(3):
        sim.step()
        sim.settle(3)
    sim.drains = {"h2"}
    sim.drain_count += 1
    for _ in range(4):
        sim.settle(3)
        sim.step()
    sim.settle(3)

    assert sim.record.plan.phase is Phase.DONE
    assert sim.workers["w3"].status.rank == 0


def test_a_drained_host_hands_over_and_returns_to_the_pool() -> None:
    """The whole planned path, in order."""
    sim = Simulation(ranks=2, standbys=1)
    sim.settle(2)
    sim.step()
    sim.drains = {"h0"}
    sim.settle(3)
    assert sim.record is not None
    assert sim.record.plan is not None
    assert sim.record.plan.phase is Phase.READY

    sim.step()
    sim.settle(3)
    sim.step()
    sim.settle(3)

    assert sim.record.plan.phase is Phase.DONE
    assert sim.workers["w2"].status.rank == 0
    assert sim.workers["w0"].status.activity is Activity.STANDBY
    assert [m.phase for m in sim.record.plan.timeline] == [
        Phase.PREPARE,
        Phase.READY,
        Phase.SWITCH,
        Phase.DONE,
    ]


def test_a_lost_rank_is_taken_over_and_one_step_is_repeated_at_most() -> None:
    """Kill in the vote: who knew of the commit decides for all."""
    sim = Simulation(ranks=3, standbys=1)
    sim.settle(2)
    sim.step()
    sim.step(aware={1})
    sim.kill("w0")
    sim.settle()
    assert sim.record is not None
    assert sim.record.plan is not None

    assert sim.record.plan.resume == 2
    assert sim.step()
    sim.settle()
    assert sim.record.plan.phase is Phase.DONE
    assert {w.status.step for w in sim.workers.values() if w.alive} == {3}


def test_a_rewritten_plan_never_falls_below_a_step_somebody_rolled_forward_to() -> None:
    """The only rank that knew of the commit dies after the others were told to roll forward."""
    sim = Simulation(ranks=3, standbys=2)
    sim.settle(2)
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
    assert sim.record is not None
    assert sim.record.plan is not None
    assert sim.record.plan.resume == 2
    sim.kill("w0")
    sim.settle()

    assert sim.record.plan.floor == 2
    assert {w.status.step for w in sim.workers.values() if w.alive and w.state} == {2}


def test_a_job_on_one_host_can_be_drained() -> None:
    """All old members leave: only they and their joiners know that the vote switched."""
    sim = Simulation(ranks=1, standbys=1)
    sim.settle(2)
    sim.step()
    sim.drains = {"h0"}
    sim.settle(3)
    sim.step()
    sim.settle(3)
    sim.step()
    sim.settle(3)
    assert sim.record is not None
    assert sim.record.plan is not None

    assert sim.record.plan.phase is Phase.DONE
    assert sim.record.membership.members[0].worker == "w1"


def test_a_state_that_existed_once_is_never_made_up_from_another_rank() -> None:
    """The job fails with a sentence, though a standby and a survivor are there."""
    sim = Simulation(ranks=2, standbys=1, alike=False)
    sim.settle(2)
    sim.step()
    sim.settle(3)
    sim.kill("w0")
    sim.settle()

    assert sim.record is not None
    assert sim.record.state is JobState.FAILED
    assert "the state of rank 0 existed once and is lost" in sim.record.detail
    assert sim.workers["w2"].state is None


def test_a_state_that_existed_once_lives_on_in_its_hot_shadow() -> None:
    """Only in that of the rank itself: the first one follows the last rank."""
    for victim, survives in (("w1", True), ("w0", False)):
        sim = Simulation(ranks=2, standbys=1, hot=1, alike=False)
        sim.settle(2)
        for _ in range(3):
            sim.step()
            sim.settle(3)
        assert sim.workers["w2"].status.activity is Activity.IN_STEP
        sim.kill(victim)
        sim.settle()

        assert sim.record is not None
        if not survives:
            assert sim.record.state is JobState.FAILED
            continue
        assert sim.record.plan is not None
        assert sim.record.plan.phase is Phase.RESUME
        assert sim.record.plan.moves[0].source is None
        assert sim.workers["w2"].status.rank == 1
        assert sim.workers["w2"].state == (0, 1, 2)


def test_a_joiner_that_dies_right_after_its_first_step_is_replaced_from_a_replica() -> None:
    """The leaver has its state of before, and the others have committed one more step: it cannot
    take its rank back, and nobody waits for it."""
    sim = Simulation(ranks=3, standbys=2)
    sim.drains, sim.drain_count = {"h0"}, 1
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
