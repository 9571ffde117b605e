"""The real core under a control plane that loses, repeats and delays, with stalling leaders."""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.core.machine import HOSTS, Machine
from tests.core.plane import Plane
from tests.core.proof import thorough


class ControlPlane(Machine):
    """Each read, decision, write and delivery happens at its own time, or never."""

    sim: Plane

    def simulated(self) -> Plane:
        return Plane(ranks=3, standbys=2, hot=self.hot)

    # --- leaders ----------------------------------------------------------------------------------

    @rule(host=HOSTS)
    def lease_is_asked_for(self, host: str) -> None:
        self.sim.ask(host)

    @rule()
    def lease_lapses(self) -> None:
        self.sim.lapse()

    @rule(host=HOSTS)
    def leader_decides(self, host: str) -> None:
        self.sim.decide(host)

    @rule(host=HOSTS)
    def write_arrives(self, host: str) -> None:
        self.sim.write(host)

    @rule(host=HOSTS)
    def leader_acts_at_once(self, host: str) -> None:
        self.sim.ask(host)
        self.sim.decide(host)
        self.sim.write(host)

    @rule()
    def a_moment_passes(self) -> None:
        self.sim.now += 0.6

    @rule()
    def long_is_waited(self) -> None:
        self.sim.wait()

    # --- the store --------------------------------------------------------------------------------

    @rule()
    def replica_catches_up(self) -> None:
        self.sim.copy_to_replica()

    @rule()
    def replica_takes_over(self) -> None:
        self.sim.fail_over()

    @precondition(lambda self: self._can_be_put_back())
    @rule()
    def store_is_wiped(self) -> None:
        self.sim.wipe()

    def _can_be_put_back(self) -> bool:
        record = self.sim.redis.record
        return record is None or self.sim.remembered() >= record.revision

    # --- hosts ------------------------------------------------------------------------------------

    @rule(host=HOSTS)
    def daemon_reads(self, host: str) -> None:
        self.sim.read(host)

    @precondition(lambda self: self.sim.redis.record is not None)
    @rule(host=HOSTS)
    def daemon_restarts(self, host: str) -> None:
        self.sim.restart(host)

    @rule(data=st.data())
    def order_is_sent(self, data: st.DataObject) -> None:
        self.sim.send(self.pick(data))

    @rule(data=st.data())
    def order_arrives(self, data: st.DataObject) -> None:
        self.sim.hear(self.pick(data))

    @rule(data=st.data())
    def all_orders_arrive(self, data: st.DataObject) -> None:
        self.sim.deliver(self.pick(data))

    @rule(rounds=st.integers(1, 3))
    def everything_is_heard(self, rounds: int) -> None:
        self.sim.settle(rounds)


class ShadowedControlPlane(ControlPlane):
    """The same with joiners that shadow before they take over, and a hot standby."""

    hot = 1


def test_hosts_that_come_back_one_by_one_after_redis_was_emptied_are_not_dead() -> None:
    """A job has been holding for a standby; the leader's own host reports first again."""
    sim = Plane(ranks=3, standbys=0)
    sim.settle(2)
    sim.step()
    sim.kill("w2")
    sim.settle(3)
    sim.wait()
    sim.turn()
    sim.wipe()
    sim.read("h0")
    sim.publish("w0")
    sim.turn()
    record = sim.redis.record
    assert record is not None
    assert record.plan is not None
    assert record.plan.dead == ("w2",)

    sim.add_standby("new")
    sim.settle(5)
    assert sim.step()


def test_a_former_leader_never_leads_again_under_its_old_epoch() -> None:
    """Redis failed over to a replica with its old lease; daemons have obeyed a later one."""
    sim = Plane(ranks=2, standbys=1)
    sim.settle(2)
    sim.step()
    sim.settle(1)
    sim.copy_to_replica()
    sim.lapse()
    for host in ("h1", "h0"):
        sim.ask(host)
    sim.drain("h1")
    sim.settle(2)
    sim.fail_over()
    assert sim.redis.holder == "h0"
    for _ in range(3):
        sim.settle(3)
        sim.step()

    assert all(d.obeyed == sim.redis.lease for d in sim.daemons.values())
    assert sim.redis.record is not None
    assert sim.redis.record.membership.epoch == 2


THOROUGH = thorough("plane", 50)
ControlPlane.TestCase.settings = ShadowedControlPlane.TestCase.settings = THOROUGH
TestControlPlane = ControlPlane.TestCase
TestShadowedControlPlane = ShadowedControlPlane.TestCase
