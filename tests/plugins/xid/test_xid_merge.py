"""Lines and events of the same faults."""

from __future__ import annotations

import pytest
from tmd_detectors.xid.detector import Follower, XidConfig, load
from tmd_detectors.xid.findings import CONFIRMED
from tmd_detectors.xid.merge import ACTIONS, MERGE_S, UNNAMED, Merge
from tmd_detectors.xid.verdicts import asked
from tmd_detectors.xid.xid_event import XidEvent

from tmd.core.alerts.findings import Origin
from tmd.core.alerts.triage import FindingsBoard, fold
from tmd.plugin import Severity, State, Strategy

from .corpus import A, B, record

RAISED, CLEARED = State.RAISED, State.CLEARED
FATAL, DEGRADED, WARNING = Severity.FATAL, Severity.DEGRADED, Severity.WARNING
RESET = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
NONE = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"


class Host:
    """A host whose driver reports twice, within one second unless ``at`` differs."""

    def __init__(self, folder, patience_s=MERGE_S):
        merge = Merge(patience_s)
        self.follower = Follower(XidConfig(), load(XidConfig()), folder / "xid.json", 0.0, merge)
        self._seq = 0

    def line(self, xid, detail="", at=10.0, pci=A):
        self._seq += 1
        text = f"NVRM: Xid (PCI:{pci[:-2]}): {xid}, {detail}"
        return list(self.follower.take(record(text, self._seq, at), at))

    def event(self, xid, at=10.0, pci=A, action=None):
        return list(self.follower.receive(XidEvent(xid, pci, action=action), at))

    def later(self, at):
        return list(self.follower.period(at, 0))


@pytest.fixture
def host(tmp_path):
    return Host(tmp_path)


@pytest.fixture
def deaf(tmp_path):
    """A host whose log cannot be read."""
    return Host(tmp_path, patience_s=0.0)


def brief(signals):
    return [(s.code, s.severity, s.state) for s in signals]


def test_a_line_followed_by_its_event_is_one_finding_with_count_one(host):
    (line,) = host.line(79)
    (event,) = host.event(79, at=11.0)

    assert (line.code, line.entity, line.count) == (event.code, event.entity, 1)
    assert (event.count, event.severity, event.state) == (0, FATAL, RAISED)
    assert event.evidence == (*line.evidence, CONFIRMED)
    assert host.event(79, at=11.5) == host.later(30.0) == []


def test_an_event_followed_by_its_line_is_one_finding_with_count_one(host):
    early = host.event(79)
    line, confirmed = host.line(79, at=10.0 + MERGE_S)

    assert early == []
    assert (line.count, confirmed.count) == (1, 0)
    assert confirmed.evidence == (*line.evidence, CONFIRMED)
    assert host.later(30.0) == []


@pytest.mark.parametrize("first", ["line", "event"])
def test_line_and_event_become_one_alert_with_both_as_evidence(host, first):
    board, news = FindingsBoard(), []
    both = [host.line, host.event] if first == "line" else [host.event, host.line]
    for signal in [s for tell in both for s in tell(79)]:
        origin = Origin(host="h1", detector="xid", strategy=Strategy.ADVISE)
        board, more = fold(board, signal, origin, alert_id="1", now=1.0, clock=1.0)
        news += more
    (alert,) = board.alerts

    assert (alert.code, alert.count, len(news)) == ("xid.79", 1, 1)
    assert "NVRM: Xid (PCI:0000:03:00): 79, " in alert.evidence
    assert CONFIRMED in alert.evidence


def test_an_event_without_a_line_is_judged_alone(host):
    assert host.event(79) == []
    assert host.later(11.0) == []

    (signal,) = host.later(10.0 + MERGE_S)

    assert (signal.code, signal.entity, signal.severity) == ("xid.79", f"pci:{A}", FATAL)
    assert any("NVML event" in e for e in signal.evidence)
    assert host.later(30.0) == []


def test_a_late_line_belongs_to_the_same_finding(host):
    host.event(79)
    (alone,) = host.later(13.0)

    assert host.line(79, at=14.0) == []
    (counted,) = host.later(15.0)
    assert (counted.code, counted.entity, counted.count) == (alone.code, alone.entity, 1)


def test_only_a_recent_fault_of_the_same_gpu_matches_an_event(host):
    host.line(13)
    host.event(13, pci=B)
    host.event(13, at=20.0)
    alone, counted = host.later(22.5)

    assert (alone.entity, alone.count) == (f"pci:{B}", 1)
    assert (counted.entity, counted.count) == (f"pci:{A}", 1)


def test_without_a_log_no_event_waits(deaf):
    deaf.event(79)

    assert brief(deaf.later(10.0)) == [("xid.79", FATAL, RAISED)]


@pytest.mark.parametrize("xid", [13, 48, 63, 79, 95, 119, 149, 174])
def test_an_event_is_judged_as_a_line_without_text(tmp_path, xid):
    (tmp_path / "other").mkdir()
    host, deaf = Host(tmp_path), Host(tmp_path / "other", patience_s=0.0)
    deaf.event(xid)

    assert brief(deaf.later(10.0)) == brief(host.line(xid))


def test_an_event_without_text_clears_nothing_of_its_line(host):
    """A line that calls the link fatal, and one of XID 154 with the requested recovery."""
    assert brief(host.line(149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x1 0x0)"))[0][1] is FATAL
    assert brief(host.line(154, RESET)) == [("xid.154", FATAL, RAISED)]
    host.event(149)
    host.event(154, at=10.5)

    assert [s for s in host.later(30.0) if s.state is CLEARED] == []


def test_the_event_of_a_recovery_raises_nothing(host):
    host.line(154, RESET)
    assert brief(host.line(154, NONE, at=60.0)) == [("xid.154", FATAL, CLEARED)]

    assert host.event(154, at=60.1, action=0) == []
    assert host.later(90.0) == []


def test_a_symptom_reported_by_both_is_no_finding(host):
    host.line(79)
    assert host.line(45, at=11.0) == []
    assert host.event(45, at=11.0) == []

    assert brief(host.later(30.0)) == [("xid.79", FATAL, RAISED)]  # the line of 45, counted


def test_without_a_log_symptoms_and_recoveries_come_from_events(deaf):
    deaf.event(79)
    deaf.event(45, at=11.0)
    cause, symptom = deaf.later(11.0)
    deaf.event(163, at=50.0, pci=B)
    deaf.event(162, at=60.0, pci=B)

    assert (cause.code, symptom.code, symptom.count) == ("xid.79", "xid.79", 1)
    assert brief(deaf.later(60.0)) == [
        ("xid.163", DEGRADED, RAISED),
        ("xid.163", DEGRADED, CLEARED),
    ]


def test_without_a_log_xid_154_goes_by_the_recovery_action(deaf):
    deaf.event(119)
    deaf.event(154, action=1)
    asks = brief(deaf.later(10.0))
    deaf.event(154, at=60.0, action=0)

    assert asks == [("xid.119", FATAL, RAISED), ("xid.154", FATAL, RAISED)]
    assert brief(deaf.later(60.0)) == [("xid.119", FATAL, CLEARED), ("xid.154", FATAL, CLEARED)]


def test_an_unavailable_recovery_action_moves_no_rank(deaf):
    deaf.event(154)
    deaf.event(154, pci=B, action=9)

    assert {s.severity for s in deaf.later(10.0)} == {WARNING}


def test_recovery_actions_are_judged_as_the_lines_are():
    verdicts = [asked(f"GPU recovery action changed to {ACTIONS[n]}") for n in range(8)]

    assert verdicts == ["clear", "fail", "fail", "drain", "drain", "fail", "fail", "fail"]


def test_an_xid_unnamed_by_nvml_takes_the_number_of_its_line(host):
    host.event(UNNAMED)
    line, confirmed = host.line(200, at=11.0)
    host.event(UNNAMED, at=12.0)

    assert (line.code, confirmed.code, confirmed.count) == ("xid.200", "xid.200", 0)
    assert host.later(30.0) == []


def test_an_xid_without_number_and_line_is_an_alert(host):
    host.event(UNNAMED)
    (signal,) = host.later(13.0)

    assert (signal.code, signal.severity) == ("xid.999", WARNING)
    assert "NVML has no number for it" in signal.message


def test_a_burst_of_one_event_counts_once(host):
    """NVML repeats the last XID of a burst once for each of the burst."""
    for n in range(100):
        host.event(79, at=10.0 + n / 1000)
    (signal,) = host.later(13.0)

    assert (signal.code, signal.count) == ("xid.79", 1)
