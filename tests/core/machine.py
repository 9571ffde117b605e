"""What happens to a job under any leader: the rules that all its state machines share."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.core.simulation import Simulation
from tmd.core.planning.links import IN_VAIN
from tmd.core.values.model import JobState

HOSTS = st.sampled_from(["h0", "h1", "h2"])


class Machine(RuleBasedStateMachine):
    """Kills, cuts, drains and late statuses in any order; subclasses add the leader's decisions."""

    hot: int | None = None
    """As in :class:`Simulation`."""

    def __init__(self) -> None:
        super().__init__()
        self.sim = self.simulated()
        self.kills = 0

    def simulated(self) -> Simulation:
        """Of three ranks on the hosts of ``HOSTS``."""
        raise NotImplementedError

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.sim.workers)))

    @rule(data=st.data())
    def status_arrives(self, data: st.DataObject) -> None:
        self.sim.publish(self.pick(data))

    # --- workers ----------------------------------------------------------------------------------

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
        if not alive:
            return  # the job has failed
        victim = data.draw(st.sampled_from(alive))
        if len([w for w in holders if w.name != victim]) >= 1:
            self.kills += 1
            self.sim.kill(victim)
            self.lost()

    def lost(self) -> None:
        """A worker has died: another one comes."""
        self.sim.add_standby(f"new{self.kills}")

    # --- operators --------------------------------------------------------------------------------

    @rule(host=HOSTS)
    def drain(self, host: str) -> None:
        self.sim.drain(host)

    @rule()
    def undrain(self) -> None:
        self.sim.drains = set()

    # --- what must hold ---------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        self.sim.check()

    def teardown(self) -> None:
        """In the end the job continues: a step commits on every rank. Only a job whose links broke
        in the same step again and again has failed."""
        self.sim.drains = set()
        for _ in range(6):
            self.sim.settle()
            if self.sim.step():
                break
        else:
            record = self.sim.record
            if record is not None and record.state is JobState.FAILED:
                assert record.detail.startswith(f"one step broke {IN_VAIN} times")
                return
            raise AssertionError(f"the job does not go on: {record}")
        self.sim.check()
