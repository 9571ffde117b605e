"""The consequences of XIDs."""

from __future__ import annotations

import pytest
from tmd_detectors.xid.findings import XidFindings
from tmd_detectors.xid.lines import XidLineReader
from tmd_detectors.xid.memory import XidMemory
from tmd_detectors.xid.table import load, parse

from tmd.plugin import PluginError, Severity, State

TABLE = load()
RAISED, CLEARED = State.RAISED, State.CLEARED
FATAL, DEGRADED = Severity.FATAL, Severity.DEGRADED
WARNING, INFO = Severity.WARNING, Severity.INFO

# From the summary of the field survey, not from the table.
NOW = {46, 48, 54, 62, 64, 79, 81, 95, 110, 119, 120, 136, 140, 143, 151, 155, 158, 166, 167, 169}
NOW |= {173}
LATER = {94, 156, 163, 168}
DECODED = {74, 144, 145, 146, 149, 150}


class Host:
    """A host whose driver writes lines."""

    def __init__(self, memory=None):
        self.findings = XidFindings(TABLE, memory or XidMemory(), now=0.0)
        self._reader = XidLineReader()

    def says(self, xid, detail="", gpu="03", at=100.0):
        """The signals for one line as (code, severity, state)."""
        return [brief(s) for s in self.hears(xid, detail, gpu, at)]

    def hears(self, xid, detail="", gpu="03", at=100.0):
        text = f"NVRM: Xid (PCI:0000:{gpu}:00): {xid}, {detail}"
        return list(self.findings.observe(self._reader.take(text, at), now=at))


def brief(signal):
    return int(signal.code.removeprefix("xid.")), signal.severity, signal.state


@pytest.fixture
def host():
    return Host()


@pytest.mark.parametrize("xid", range(1, 174))
def test_every_row_has_the_consequence_of_the_survey(host, xid):
    """A first line without further text: FATAL, DEGRADED, or an alert that moves no rank."""
    signals = host.says(xid)

    if xid == 162:
        assert signals == []
    elif xid in NOW:
        assert signals == [(xid, FATAL, RAISED)]
    elif xid in LATER or xid == 74:
        assert signals == [(xid, DEGRADED, RAISED)]
    else:
        ((code, severity, state),) = signals
        assert (code, state) == (xid, RAISED)
        assert severity in (WARNING, INFO)


def test_the_shipped_table_is_complete():
    assert sorted(TABLE.rows) == list(range(1, 174))
    assert TABLE.source
    assert TABLE.as_of


@pytest.mark.parametrize("unit", ["NETIR_LINK_EVT", "NETIR_LINK_DOWN"])
@pytest.mark.parametrize(("subcode", "severity"), [(37, FATAL), (38, WARNING), (40, WARNING)])
def test_a_link_event_that_the_catalogue_ignores_moves_no_rank(host, unit, subcode, severity):
    """The catalogue has no immediate action for sub-codes 38 and 40, whatever the line states."""
    detail = f"{unit} Fatal XC0 i0 Link 00 ({subcode << 20 | 0x1C6:#010x} 0x00000000)"

    (signal,) = host.hears(149, detail)

    assert signal.severity is severity
    assert f"{unit}, fatal, link 0, sub-code {subcode}" in signal.evidence[-2]


def test_the_same_number_of_another_unit_is_not_a_link_event(host):
    detail = f"NETIR_MFDE_EVENT Fatal XC0 i0 Link 00 ({38 << 20:#010x} 0x00000001)"

    assert host.says(149, detail) == [(149, FATAL, RAISED)]


def test_an_xid_that_the_catalogue_ignores_moves_no_rank_without_a_reason(host):
    """63 is the exception: its repair waits for the reset, as NVML reports."""
    ignored = [row for row in TABLE.rows.values() if row.catalogue == "IGNORE"]

    assert {row.xid for row in ignored} >= {63, 160}
    assert {row.verdict.value for row in ignored} <= {"alert", "note", "drain"}
    assert {row.xid for row in ignored if row.verdict.value == "drain"} <= {63}


@pytest.mark.parametrize("wrong", ["38", "38=never", "x=alert"])
def test_an_invalid_subcode_is_an_error_of_the_table(wrong):
    lines = ["# source: s", "# as_of: d", "xid,meaning,verdict,subcodes", f"149,link,alert,{wrong}"]

    with pytest.raises(PluginError, match="XID 149"):
        parse(lines, "mine.csv")


@pytest.mark.parametrize("xid", sorted(DECODED))
def test_a_link_event_is_fatal_if_its_line_has_fatal(host, xid):
    detail = "UNIT Fatal XC0 i0 Link 01 (0x00000001 0x0)"
    if xid == 74:
        detail = "NVLink: fatal error detected on link 2(0x0, 0x0, 0x10000)"

    assert host.says(xid, detail) == [(xid, FATAL, RAISED)]


@pytest.mark.parametrize("xid", sorted({*DECODED, 147, 148} - {74}))
def test_a_non_fatal_link_event_moves_no_rank(host, xid):
    assert host.says(xid, "UNIT Nonfatal XC0 i0 Link 01 (0x1 0x0)") == [(xid, WARNING, RAISED)]


@pytest.mark.parametrize("xid", sorted(DECODED - {74}))
def test_fatal_after_a_process_and_link_down_both_count(host, xid):
    process = "pid='<unknown>', name=<unknown>, "

    assert host.says(xid, f"{process}UNIT Fatal XC0 i0 Link 01 (0x1 0x0)") == [(xid, FATAL, RAISED)]
    assert host.says(xid, "NETIR_LINK_DOWN link down", gpu="04") == [(xid, FATAL, RAISED)]


def test_an_unknown_text_leaves_the_verdict_to_the_table(host):
    """An unknown severity, and status words that NVIDIA's rules would look up."""
    assert host.says(144, "SAW_MVB Fatality XC0 i0 Link 01 (0x1 0x0)") == [(144, WARNING, RAISED)]
    assert host.says(145, "0xdeadbeef 0x80000000", gpu="04") == [(145, WARNING, RAISED)]


@pytest.mark.parametrize("xid", [147, 148])
def test_an_xid_without_a_fatal_rule_is_never_fatal(host, xid):
    assert host.says(xid, "TREX Fatal XC0 i0 Link 01 (0x1 0x0)") == [(xid, WARNING, RAISED)]


@pytest.mark.parametrize(
    ("word", "part"), [("0x00400000", "cartridge"), ("0x00a00000", "physical")]
)
def test_a_link_that_needs_inspection_is_reported_as_such(host, word, part):
    (signal,) = host.hears(149, f"NETIR_LINK_EVT Fatal XC0 i0 Link 08 ({word} 0x0)")

    assert f"inspect the {part}" in signal.message


def test_an_unknown_number_alerts_and_moves_no_rank(host):
    assert host.says(174) == [(174, WARNING, RAISED)]
    assert [host.says(174, f"pid={n}, name=x", at=200.0 + n) for n in range(9)] == [[]] * 9


def test_application_faults_never_move_a_rank_however_often(host):
    """A job that crashes in a loop meets them with a new process each time."""
    seen = [s for n in range(20) for x in (13, 31) for s in host.says(x, f"pid={n}", at=100.0 + n)]

    assert {severity for _, severity, _ in seen} == {WARNING}


def test_repeats_of_different_processes_worsen_a_finding(host):
    first = host.says(109, "pid=1, name=a")
    same = host.says(109, "pid=1, name=a", at=200)
    second = host.says(109, "pid=2, name=a", at=300)
    third = host.says(109, "pid=3, name=a", at=400)

    assert first == [(109, WARNING, RAISED)]
    assert same == []
    assert second == [(109, DEGRADED, RAISED)]
    assert third == [(109, FATAL, RAISED)]


def test_repeats_a_day_apart_or_without_a_process_do_not_worsen_it(host):
    host.says(109, "pid=1, name=a", at=0)

    assert host.says(109, "pid=2, name=a", at=90_000) == []
    assert host.says(109, "pid='<unknown>', name=<unknown>", at=90_001) == []
    assert host.says(109, "pid=3, name=a", gpu="04", at=90_002) == [(109, WARNING, RAISED)]


# --- companions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("symptom", [43, 45])
def test_a_symptom_after_its_cause_is_no_finding(host, symptom):
    host.says(79)

    assert host.says(symptom, at=104.9) == []


@pytest.mark.parametrize("symptom", [43, 45])
def test_a_cause_clears_an_earlier_symptom(host, symptom):
    assert host.says(symptom) == [(symptom, INFO, RAISED)]
    assert host.says(79, at=104.0) == [(symptom, INFO, CLEARED), (79, FATAL, RAISED)]


def test_a_later_or_another_gpus_symptom_is_its_own_finding(host):
    host.says(79)

    assert host.says(45, gpu="04", at=101) == [(45, INFO, RAISED)]
    assert host.says(45, at=106) == [(45, INFO, RAISED)]


@pytest.mark.parametrize("kind", [171, 172])
def test_a_double_bit_error_names_the_kind_of_memory(host, kind):
    host.says(48)
    assert host.says(kind, "uncorrectable", at=101) == []
    (told,) = host.findings.flush()

    assert told.code == "xid.48"
    assert any(f"XID {kind}" in e for e in told.evidence)


@pytest.mark.parametrize("consequence", [63, 64, 94, 95])
def test_the_consequence_of_a_double_bit_error_is_a_separate_finding(host, consequence):
    host.says(48)
    ((code, severity, state),) = host.says(consequence, at=101)

    assert (code, state) == (consequence, RAISED)
    assert severity is not INFO


def test_a_following_recovery_action_does_not_lower_the_fault(host):
    host.says(119)

    assert host.says(154, RESET, at=101) == [(154, FATAL, RAISED)]


def test_both_ends_of_a_broken_link_give_one_finding(host):
    word = "NVLink: fatal error detected on link 2(0x0)"

    assert host.says(74, word, gpu="03") == [(74, FATAL, RAISED)]
    assert host.says(74, word, gpu="04", at=102) == [(74, WARNING, RAISED)]


# --- the driver's own severity --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "severity"),
    [
        ("0x1 (GPU Reset Required)", FATAL),
        ("0x2 (Node Reboot Required)", FATAL),
        ("0x3 (Drain P2P)", DEGRADED),
        ("0x4 (Drain and Reset)", DEGRADED),
        ("0x9 (Something New)", WARNING),
    ],
)
def test_the_recovery_action_is_judged_by_its_text(host, action, severity):
    line = f"GPU recovery action changed from 0x0 (None) to {action}"

    assert host.says(154, line) == [(154, severity, RAISED)]


NONE = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
RESET = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"


def test_xid_154_none_clears_findings_that_a_reset_cures(host):
    host.says(119)
    host.says(154, RESET)

    assert host.says(154, NONE, gpu="04") == []
    assert host.says(154, NONE) == [(119, FATAL, CLEARED), (154, FATAL, CLEARED)]


@pytest.mark.parametrize("xid", [48, 54, 64, 79, 81, 95])
def test_xid_154_none_does_not_clear_findings_that_need_a_boot(host, xid):
    host.says(xid)

    assert host.says(154, NONE) == []
    assert host.says(xid, at=900) == []


def test_a_milder_request_of_the_driver_is_believed(host):
    host.says(154, RESET)
    less = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x3 (Drain P2P)"

    assert host.says(154, less) == [(154, FATAL, CLEARED), (154, DEGRADED, RAISED)]


def test_another_request_of_the_driver_replaces_the_first(host):
    """A reset does not help a GPU whose driver has asked for a reboot since."""
    host.says(154, RESET)
    more = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x2 (Node Reboot Required)"

    assert host.says(154, more) == [(154, FATAL, RAISED)]
    assert host.says(154, more) == []


def test_xid_163_is_raised_again_after_xid_162(host):
    assert host.says(162) == []
    assert host.says(163, at=101) == [(163, DEGRADED, RAISED)]
    assert host.says(162, at=102) == [(163, DEGRADED, CLEARED)]
    assert host.says(163, at=103) == [(163, DEGRADED, RAISED)]


def test_xid_162_clears_only_xid_163(host):
    host.says(163)
    host.says(164)

    assert host.says(162, gpu="04") == []
    assert host.says(162) == [(163, DEGRADED, CLEARED)]


# --- time and memory ------------------------------------------------------------------------------


def test_silence_clears_only_findings_that_move_no_rank(host):
    for xid in (13, 79, 94):
        host.says(xid, at=100)
    early = list(host.findings.quiet(now=699, quiet_s=600))
    late = [brief(s) for s in host.findings.quiet(now=700, quiet_s=600)]

    assert early == []
    assert late == [(13, WARNING, CLEARED)]


def test_repeats_are_reported_together(host):
    host.says(95)
    for _ in range(1000):
        assert host.says(95) == []

    assert [(s.code, s.count) for s in host.findings.flush()] == [("xid.95", 1000)]
    assert list(host.findings.flush()) == []


def test_findings_that_need_a_recovery_survive_a_restart(host):
    for xid in (13, 79, 94):
        host.says(xid)
    host.says(109, "pid=1, name=a")
    later = Host(host.findings.memory("boot", 5))

    assert [brief(s)[0] for s in later.findings.restated()] == [79, 94]
    assert later.says(79, at=200) == []
    assert later.says(109, "pid=2, name=a", at=200) == [(109, DEGRADED, RAISED)]


# --- the table is data ----------------------------------------------------------------------------

HEAD = ["# source: ours", "# as_of: 2026-01", "xid,meaning,verdict"]


def test_a_configured_table_replaces_the_shipped_one(tmp_path):
    file = tmp_path / "own.csv"
    file.write_text("\n".join([*HEAD, "13,bad kernel,fail"]))

    assert load(file).rows[13].verdict == "fail"
    assert load(file).origin == "ours (2026-01)"


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([*HEAD, "13,bad kernel,explode"], "XID 13"),
        ([*HEAD, "x,bad kernel,fail"], "XID x"),
        ([*HEAD, "13,a,fail", "13,b,fail"], "twice"),
        ([*HEAD, "13,a,fail,surplus"], "XID 13"),
        (HEAD, "needs rows"),
        ([HEAD[2], "13,a,fail"], "# source"),
    ],
)
def test_a_wrong_table_is_refused(lines, complaint):
    with pytest.raises(PluginError, match=complaint):
        parse(lines, "own.csv")


def test_a_missing_table_is_refused(tmp_path):
    with pytest.raises(PluginError, match=r"none\.csv"):
        load(tmp_path / "none.csv")
