"""The board of findings when a detector's configuration changes."""

from __future__ import annotations

from tmd.core.alerts import triage
from tmd.core.alerts.findings import FindingRules, Origin
from tmd.core.alerts.reconfiguration import farewells, with_strategy
from tmd.core.values.model import Severity, Signal, State, Strategy


def board(*detectors):
    found = triage.FindingsBoard()
    for name in detectors:
        origin = Origin("h1", name, Strategy.ACT)
        signal = Signal("a.b", f"gpu:{name}", Severity.FATAL)
        found, _ = triage.fold(found, signal, origin, alert_id=name, now=0.0, clock=0.0)
    return found


def test_raised_findings_are_limited_to_the_new_strategy():
    before = board("a", "b")
    after = with_strategy(before, "a", Strategy.OBSERVE)

    assert {x.detector: x.strategy for x in after.alerts} == {
        "a": Strategy.OBSERVE,
        "b": Strategy.ACT,
    }
    assert [x.id for x in after.alerts] == [x.id for x in before.alerts]


def test_farewells_clear_all_of_one_detector():
    found = board("a", "b")
    for signal in farewells(found, "a", "off"):
        origin = Origin("h1", "a", Strategy.OBSERVE)
        found, news = triage.fold(found, signal, origin, alert_id="new", now=1.0, clock=1.0)

        assert [(n.id, n.state, n.message) for n in news] == [("a", State.CLEARED, "off")]

    assert [x.detector for x in found.alerts] == ["b"]


def test_suspects_are_limited_and_cleared_as_well():
    """Otherwise a detector that was switched off would raise it after its hold time."""
    origin = Origin("h1", "a", Strategy.ACT, FindingRules(hold_s=5.0))
    signal = Signal("a.b", "gpu:0", Severity.FATAL)
    found, news = triage.fold(
        triage.FindingsBoard(), signal, origin, alert_id="x", now=0.0, clock=0.0
    )
    assert news == ()

    retuned = with_strategy(found, "a", Strategy.OBSERVE)
    assert [s.origin.strategy for s in retuned.suspects.values()] == [Strategy.OBSERVE]
    for farewell in farewells(found, "a", "off"):
        found, _ = triage.fold(found, farewell, origin, alert_id="y", now=1.0, clock=1.0)
    assert found.suspects == {}
    assert triage.ripened(found, now=9.0, clock=9.0)[1] == ()
