"""Running the policies and predicting the result."""

from __future__ import annotations

import pytest
from msgspec import structs
from tmd_policies.drain_degraded import DrainDegraded
from tmd_policies.drain_requested import DrainRequested

from tests.plugins.clusters import RECORD, cluster, finding, host, planned
from tests.values import worker
from tmd.core.alerts.breaker import BreakerRules, tripped
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.limits import PlanLimits
from tmd.core.values.model import Activity, Mark, Phase, State, Strategy, Urgency, Verdict
from tmd.core.values.requests import DrainRequest
from tmd.daemon.breaker import breaker_alert, end_pause
from tmd.daemon.policy_runner import foreseen, rulings, withheld
from tmd.plugin import Policy
from tmd.testing import MemoryStore

RULES = BreakerRules()
OPEN = Breaker(open=True, reason="too much", at=50.0)


class Broken(Policy):
    name = "broken"

    def decide(self, view):
        raise RuntimeError("foreign code")


class Reckless(Policy):
    """A policy that ignores strategies."""

    name = "reckless"

    def decide(self, view):
        return [
            Verdict("job", worker(h.host), Urgency.DRAIN, alert.code, "r", policy=self.name)
            for h in view.hosts
            for alert in h.alerts
        ]


def ailing(**changes):
    return host("h2", finding(**changes), at=1000.0)


def test_one_failing_policy_does_not_stop_the_others():
    (ruling,) = rulings([Broken(), DrainDegraded()], cluster(ailing()), RULES)

    assert (ruling.verdict.policy, ruling.held_back) == ("drain_degraded", "")


class HalfBroken(Reckless):
    """A policy whose ``decide`` is a generator that fails after its first verdict."""

    def decide(self, view):
        yield from super().decide(view)
        raise RuntimeError("third-party code")


class Senseless(Policy):
    name = "senseless"

    def decide(self, view):
        return ["not a verdict"]


def test_no_verdict_of_a_failing_policy_is_carried_out():
    failed = []
    found = rulings(
        [HalfBroken(), Senseless(), DrainDegraded()],
        cluster(ailing()),
        RULES,
        lambda policy, error: failed.append((policy.name, type(error))),
    )

    assert [ruling.verdict.policy for ruling in found] == ["drain_degraded"]
    assert failed == [("reckless", RuntimeError), ("senseless", TypeError)]


def test_text_of_a_verdict_that_is_no_unicode_is_escaped():
    """It could not be stored with the record."""

    class Garbled(Reckless):
        def decide(self, view):
            return [structs.replace(v, reason="\udcff") for v in super().decide(view)]

    (ruling,) = rulings([Garbled()], cluster(ailing()), RULES)

    assert ruling.verdict.reason.encode() == b"\\udcff"


def test_no_policy_sees_findings_with_strategy_observe():
    assert rulings([Reckless()], cluster(ailing(strategy=Strategy.OBSERVE)), RULES) == []
    assert rulings([Reckless()], cluster(ailing(strategy=Strategy.ADVISE)), RULES) != []


def test_an_open_breaker_holds_back_with_a_reason():
    asked = DrainRequest("h1", "r")
    view = cluster(ailing(), breaker=OPEN, drains=(asked,))
    found = rulings([DrainRequested(), DrainDegraded()], view, RULES)

    assert [bool(r.held_back) for r in found] == [False, True]
    assert "too much" in found[1].held_back


def test_the_reason_why_a_grave_finding_moves_no_rank_is_given():
    alike = (ailing(), host("h3", finding("h3", id="h3-1"), at=1000.0))
    observed = ailing(strategy=Strategy.OBSERVE)

    assert withheld(cluster(ailing()), RULES) == []
    assert all("raised the same" in why for _, why in withheld(cluster(*alike), RULES))
    assert len(withheld(cluster(*alike), RULES)) == 2
    ((_, why),) = withheld(cluster(observed), RULES)
    assert why == "strategy of nvml is observe"


def stepping(*hosts, **changes):
    """A view in which all ranks train and a standby waits."""
    spare = host("h4", activity=Activity.STANDBY)
    view = cluster(*hosts, spare, **changes)

    def begun(h):
        workers = tuple(structs.replace(w, step=5, world_size=3, rank=None) for w in h.workers)
        return structs.replace(h, workers=workers)

    return structs.replace(view, hosts=tuple(map(begun, view.hosts)))


def test_the_next_plan_is_predicted():
    view = stepping(ailing())
    found = rulings([DrainDegraded()], view, RULES)
    (outlook,) = foreseen(found, view, PlanLimits(), now=0.0)

    assert outlook.plan.phase is Phase.PREPARE
    assert [m.joiner.host for m in outlook.plan.moves] == ["h4"]
    assert outlook.plan.choice


def test_a_plan_held_back_by_a_pause_is_predicted():
    view = stepping(ailing(), paused=True)
    found = rulings([DrainDegraded()], view, RULES)
    (outlook,) = foreseen(found, view, PlanLimits(), now=0.0)

    assert outlook.plan is None
    assert "tmd resume" in outlook.waits


def test_a_finished_plan_is_not_predicted_again():
    over = planned(2)
    view = stepping(record=structs.replace(RECORD, plan=over, history=(over,)))
    (outlook,) = foreseen([], view, PlanLimits(), now=0.0)

    assert (outlook.plan, outlook.waits) == (None, "")


async def test_the_breaker_is_closed_at_a_time_of_the_store():
    """Findings and plans are compared with it, and an operator's clock may be wrong."""
    data = MemoryStore()
    data.breaker, data.paused, data.server_time = OPEN, True, 1234.5

    assert await end_pause(data.client(), "ann", "h2")
    assert data.breaker == Breaker(reason=OPEN.reason, at=1234.5, by="ann")
    assert not data.paused


@pytest.mark.parametrize(
    ("server_time", "at"), [(OPEN.at - 60, OPEN.at), (OPEN.at - 86_400, OPEN.at - 86_100)]
)
async def test_what_has_opened_the_breaker_does_not_count_again(server_time, at):
    """Its findings bear the clocks of hosts, and that of the store may be a little behind."""
    data = MemoryStore()
    data.breaker, data.server_time = OPEN, server_time

    assert await end_pause(data.client(), "ann", "h2")
    assert data.breaker.at == at


async def test_the_breaker_stays_closed_though_the_clock_of_the_leader_is_far_ahead():
    """What it had counted does not count again; the next moves do."""
    data = MemoryStore()
    data.breaker, data.server_time = structs.replace(OPEN, at=3660.0), 60.0
    moves = [
        planned(number, timeline=(Mark(Phase.PREPARE, 3600.0 + number),)) for number in range(14)
    ]
    before = structs.replace(RECORD, history=tuple(moves[:7]), revision=1)
    store = data.client()
    await store.put_job(before, expected=0)
    await end_pause(store, "ann", "h2")
    closed = await store.snapshot()
    await store.put_job(structs.replace(before, history=tuple(moves), revision=2), expected=1)
    moved = await store.snapshot()

    assert tripped(structs.replace(closed, breaker=Breaker(at=360.0)), RULES) is not None
    assert tripped(closed, RULES) is None
    assert tripped(moved, RULES) is not None


def test_the_breaker_alert_names_the_reason_and_the_operator():
    opened = breaker_alert(OPEN, "h1", opened_at=OPEN.at)
    by_ann = Breaker(reason="too much", at=60.0, by="ann")
    closed = breaker_alert(by_ann, "h2", opened_at=OPEN.at)

    assert (opened.state, opened.at, opened.strategy) == (State.RAISED, 50.0, Strategy.ADVISE)
    assert "tmd resume" in opened.message
    assert (closed.state, closed.id) == (State.CLEARED, opened.id)
    assert "ann" in closed.message
