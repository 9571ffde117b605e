"""Rules for injected findings: their limits, their mark, and their separation from real ones."""

from __future__ import annotations

import pytest
from msgspec import structs

from tmd.core.alerts.findings import BANNED, FindingRules, Origin
from tmd.core.alerts.injection import (
    MARK,
    foretold,
    forgetful,
    injector,
    marked,
    refusal,
    standing,
    unended,
)
from tmd.core.alerts.reconfiguration import with_strategy
from tmd.core.alerts.triage import FindingsBoard, fold
from tmd.core.values.model import Severity, Signal, State, Strategy

KNOWN = ("nic", "xid")
SIGNAL = Signal("xid.79", "pci:0000:3b:00.0", Severity.FATAL, message="lost")
REAL = Origin("h1", "xid", Strategy.ACT)
OURS = structs.replace(REAL, detector=injector("xid"))


def folded(board, signal, origin, number=1, clock=0.0):
    return fold(board, signal, origin, alert_id=f"h1-{number}", now=1.0, clock=clock)


@pytest.mark.parametrize(
    ("changes", "for_s", "said"),
    [
        ({}, 5.0, ""),
        ({}, 0.0, ""),
        ({"code": "xyz.79"}, 5.0, "no detector here reports 'xyz.79'"),
        ({"code": "xid"}, 5.0, "detectors are nic, xid"),
        ({"code": "xid."}, 5.0, "no detector here"),
        ({"entity": ""}, 5.0, "an entity is needed"),
        ({"message": "x" * 1001}, 5.0, "1000 characters"),
        ({"evidence": ("x" * 1001,)}, 5.0, "1000 characters"),
        ({"evidence": ("x",) * 33}, 5.0, "32 lines"),
        ({}, -1.0, "duration"),
        ({}, float("nan"), "duration"),
    ],
)
def test_an_invalid_injection_is_refused_with_the_reason(changes, for_s, said):
    found = refusal(structs.replace(SIGNAL, **changes), for_s, KNOWN)

    assert (said in found) if said else found == ""


def test_codes_of_triage_are_refused():
    assert "triage" in refusal(Signal(BANNED, "host", Severity.WARNING), 0, ("host",))


def test_an_injected_finding_is_marked():
    signal = marked(SIGNAL, "ann", 60)

    assert signal.message == f"{MARK} by ann: lost"
    assert signal.evidence == ("injected by ann for 60 s: a rehearsal, nothing was found",)


def test_an_injected_finding_never_affects_a_real_one():
    """One code and entity, found and injected, makes two findings."""
    board, _ = folded(FindingsBoard(), SIGNAL, OURS, 1)
    board, real = folded(board, SIGNAL, REAL, 2)
    board, over = folded(board, structs.replace(SIGNAL, state=State.CLEARED), OURS)

    assert [(a.detector, a.state) for a in real] == [("xid", State.RAISED)]
    assert [(a.detector, a.state) for a in over] == [("injected:xid", State.CLEARED)]
    assert [(a.id, a.count) for a in board.alerts] == [("h1-2", 1)]


def test_repeated_injections_ban_no_host():
    rules = FindingRules(repeats=2)
    origin = structs.replace(OURS, rules=forgetful(rules))
    board = FindingsBoard()
    for number in range(4):
        board, _ = folded(board, SIGNAL, origin, number)
        board, _ = folded(board, structs.replace(SIGNAL, state=State.CLEARED), origin)

    assert board == FindingsBoard()


def test_an_injected_finding_has_its_detectors_hold_time_and_forecast():
    origin = structs.replace(OURS, rules=forgetful(FindingRules(hold_s=5.0, repeats=3)))
    board, early = folded(FindingsBoard(), SIGNAL, origin)
    alert = foretold(board, SIGNAL, origin, now=1.0)

    assert early == ()
    assert alert.severity is Severity.FATAL
    assert list(standing(board)) == [("h1", "injected:xid", SIGNAL.entity, "xid.79")]


def test_injected_findings_are_found_by_code_and_entity():
    nic = Signal("nic.down", "nic:eth0", Severity.DEGRADED)
    board, _ = folded(FindingsBoard(), SIGNAL, OURS, 1)
    board, _ = folded(board, nic, structs.replace(OURS, detector=injector("nic")), 2)
    board, _ = folded(board, SIGNAL, REAL, 3)

    assert [k.code for k in standing(board)] == ["xid.79", "nic.down"]
    assert [k.code for k in standing(board, "nic.down")] == ["nic.down"]
    assert [k.code for k in standing(board, entity="nic:eth0")] == ["nic.down"]
    assert [k.code for k in standing(board, "xid")] == ["xid.79"]
    assert standing(board, "nic.down", "nic:eth1") == {}


def test_a_changed_strategy_of_the_detector_applies_to_injected_findings():
    board, _ = folded(FindingsBoard(), SIGNAL, OURS)
    board = with_strategy(board, "xid", Strategy.OBSERVE)

    assert [a.strategy for a in board.alerts] == [Strategy.OBSERVE]


def test_injected_alerts_without_an_end_are_found():
    board, first = folded(FindingsBoard(), SIGNAL, OURS, 1)
    _, over = folded(board, structs.replace(SIGNAL, state=State.CLEARED), OURS)
    _, second = folded(FindingsBoard(), SIGNAL, OURS, 2)
    _, real = folded(FindingsBoard(), SIGNAL, REAL, 3)

    assert unended([*first, *over, *second, *real]) == list(second)
