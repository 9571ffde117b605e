"""A restarted daemon does not report its workers until they have reconnected."""

from msgspec import structs

from tests.core.simulation import Simulation
from tests.core.workers import JOB
from tmd.core.planning.migration import PlanEvent, PlanFacts, failover_event
from tmd.core.values.limits import PlanLimits
from tmd.core.values.model import Activity, Member, Phase

SILENT_S, UNHEARD_S = PlanLimits().silent_s, PlanLimits().unheard_s


def moving() -> Simulation:
    """Rank 0 moves to ``w2``, which shadows it and is not in step yet; ``w3`` is a standby."""
    sim = Simulation(ranks=2, standbys=2, hot=0)
    sim.settle(2)
    sim.step()
    sim.settle(2)
    sim.drain("h0")
    sim.turn()
    for name in sim.workers:
        sim.publish(name)
    assert sim.plan.phase is Phase.PREPARE
    joiner = sim.plan.moves[0].joiner
    assert joiner is not None
    assert joiner.worker == "w2"
    return sim


def unheard(sim: Simulation, worker: str) -> None:
    """Its daemon was restarted and does not know it yet."""
    del sim.published[worker]


def test_a_move_outlives_a_restart_of_the_daemon_of_its_joiner() -> None:
    """The first report after the restart shows no change."""
    sim = moving()
    plan = sim.plan
    unheard(sim, "w2")
    sim.turn()
    sim.turn(age=SILENT_S)
    assert sim.plan == plan
    sim.settle(3)
    for _ in range(4):
        sim.step()
        sim.settle(3)

    assert sim.plan.id == plan.id
    assert sim.plan.phase is Phase.DONE
    assert sim.workers["w2"].status.rank == 0


def test_a_joiner_that_stays_silent_is_replaced() -> None:
    """Another one gets the rank, and it may be chosen again once it reports."""
    sim = moving()
    unheard(sim, "w2")
    sim.turn(age=SILENT_S + 0.1)
    aborted = sim.plan
    sim.turn()

    assert aborted.phase is Phase.ABORTED
    assert aborted.outcome == "joiner w2 is not heard from"
    assert aborted.rejected == ()
    assert [m.joiner and m.joiner.worker for m in sim.plan.moves] == ["w3"]


def copying(standbys: int) -> tuple[Simulation, Member]:
    """A joiner copies the state of a lost rank."""
    sim = Simulation(ranks=2, standbys=standbys)
    sim.settle(2)
    sim.step()
    sim.kill("w0")
    sim.turn()
    while sim.plan.phase is Phase.RECOVER:
        for name in sim.workers:
            sim.boundary(name)
            sim.deliver(name)
            sim.publish(name)
        sim.turn()
    joiner = next(m.joiner for m in sim.plan.moves if m.joiner)
    assert sim.workers[joiner.worker].status.activity is not Activity.SYNCED
    return sim, joiner


def test_while_training_stands_still_a_silent_host_is_hardly_waited_for() -> None:
    """No longer than all hosts need to report after an outage of Redis. A restarted daemon is
    waited for, since its host reports."""
    sim, joiner = copying(standbys=2)
    unheard(sim, joiner.worker)
    view = sim.view()
    gone = structs.replace(view, hosts=tuple(h for h in view.hosts if h.host != joiner.host))

    assert failover_event(sim.plan, PlanFacts(view, JOB), SILENT_S, PlanLimits()) is None
    assert failover_event(sim.plan, PlanFacts(gone, JOB), UNHEARD_S, PlanLimits()) is None
    for seen, age in ((view, SILENT_S + 0.1), (gone, UNHEARD_S + 0.1)):
        assert failover_event(sim.plan, PlanFacts(seen, JOB), age, PlanLimits()) == (
            PlanEvent.JOINER_LOST,
            f"joiner {joiner.worker} is not heard from",
        )


def test_the_only_standby_gets_the_rank_after_all_once_it_reports() -> None:
    """Its heartbeats were late while it copied the state."""
    sim, joiner = copying(standbys=1)
    unheard(sim, joiner.worker)
    sim.turn(age=SILENT_S + 0.1)
    dropped = sim.plan
    sim.settle(4)

    assert (dropped.phase, dropped.rejected, dropped.late) == (Phase.RECOVER, (), (joiner.worker,))
    assert sim.plan.phase in (Phase.RESUME, Phase.DONE)
    assert sim.workers[joiner.worker].status.rank == 0
