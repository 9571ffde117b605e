"""The board of findings when a detector's configuration changes."""

from __future__ import annotations

from tmd.core import triage
from tmd.core.model import Severity, Signal, State, Strategy
from tmd.core.retuning import farewells, with_strategy


def board(*detectors):
    found = triage.Board()
    for name in detectors:
        origin = triage.Origin("h1", name, Strategy.ACT)
        signal = Signal("a.b", f"gpu:{name}", Severity.FATAL)
        found, _ = triage.fold(found, signal, origin, alert_id=name, now=0.0)
    return found


def test_what_is_raised_goes_only_as_far_as_the_new_strategy():
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
        origin = triage.Origin("h1", "a", Strategy.OBSERVE)
        found, news = triage.fold(found, signal, origin, alert_id="new", now=1.0)

        assert (news.id, news.state, news.message) == ("a", State.CLEARED, "off")

    assert [x.detector for x in found.alerts] == ["b"]
