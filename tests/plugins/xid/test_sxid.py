"""The consequences of NVSwitch errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tmd_detectors.xid.detector import XidConfig, XidDetector
from tmd_detectors.xid.sheet import Sheet
from tmd_detectors.xid.switches import Switches
from tmd_detectors.xid.switchlines import read
from tmd_detectors.xid.sxids import load, parse
from tmd_detectors.xid.table import XidVerdict

from tests.plugins.context import signals_of
from tmd.plugin import PluginError, Severity, State

from .corpus import GPU_LOST
from .switches import LINES, NOISE

TABLE = load()
UP = "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, "
REPORT = f"{UP}Fatal, Link 63 LTSSM Fault Up"
FOLLOWS = [
    f"{UP}Severity 1 Engine instance 63 Sub-engine instance 00",
    f"{UP}Data {{0x10000000, 0x10000000, 0x00000000}}",
]


def hears(switches, *texts, at=0.0):
    return [s for text in texts for s in switches.observe(read(text), at)]


@pytest.fixture
def switches():
    return Switches(TABLE, (), 0.0)


def test_the_corpus_is_large_enough():
    assert len({text for text, _ in LINES}) >= 21


@pytest.mark.parametrize(("text", "expected"), LINES, ids=[t[:70] for t, _ in LINES])
def test_every_form_is_judged(switches, text, expected):
    fault = read(text)
    signals = list(switches.observe(fault, 0.0))

    pci, sxid, link, severity = expected
    assert (fault.pci, fault.sxid, fault.link) == (pci, sxid, link)
    wanted = (
        [] if severity is None else [(f"xid.sxid.{sxid}", f"nvswitch:{pci}", Severity(severity))]
    )
    assert [(s.code, s.entity, s.severity) for s in signals] == wanted


@pytest.mark.parametrize("text", NOISE)
def test_other_lines_are_no_switch_error(text):
    assert read(text) is None


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 2, 0], [2, 0, 1]])
def test_the_lines_of_one_error_are_one_finding(switches, order):
    """In any order: a finding that began with a description becomes that of the report."""
    lines = [REPORT, *FOLLOWS]
    signals = hears(switches, *(lines[n] for n in order))
    (*counted,) = switches.flush()

    assert {(s.code, s.entity) for s in signals} == {("xid.sxid.20034", "nvswitch:0000:05:00.0")}
    assert signals[-1].severity is Severity.FATAL
    assert [s.severity for s in signals[:-1]] in ([], [Severity.WARNING])
    assert counted == []


def test_links_of_one_switch_are_one_finding_that_names_them(switches):
    (first,) = hears(switches, REPORT)
    again = hears(switches, REPORT.replace("63", "62"), REPORT.replace("63", "05"), REPORT)
    (counted,) = switches.flush()

    assert again == []
    assert (first.count, counted.count) == (1, 3)
    assert counted.evidence[-1] == "links 5, 62, 63"


def test_a_fatal_error_stays_until_a_new_boot_and_others_clear_by_silence(switches):
    hears(switches, REPORT, LINES[1][0])

    assert [(s.code, s.state) for s in switches.quiet(599.0, 600.0)] == []
    over = [("xid.sxid.28006", State.CLEARED)]
    assert [(s.code, s.state) for s in switches.quiet(600.0, 600.0)] == over
    assert [s.code for s in Switches(TABLE, switches.grave(), 0.0).restated()] == ["xid.sxid.20034"]


def test_a_switch_that_has_cooled_down_clears_its_finding(switches):
    hot = LINES[12][0]
    signals = hears(switches, hot, hot.replace("10004", "10005"))

    assert [(s.code, s.state) for s in signals] == [
        ("xid.sxid.10004", State.RAISED),
        ("xid.sxid.10004", State.CLEARED),
    ]


@pytest.mark.parametrize("row", TABLE.rows.values(), ids=[str(n) for n in TABLE.rows])
def test_ranks_move_only_if_table_and_line_call_the_error_fatal(row):
    def severities(word):
        text = f"nvidia-nvswitch0: SXid (PCI:0000:05:00.0): {row.sxid}, {word}Link 01 words"
        return {s.severity for s in hears(Switches(TABLE, (), 0.0), text)}

    fails = row.verdict is XidVerdict.FAIL
    assert (severities("Fatal, ") == {Severity.FATAL}) == fails
    assert not (severities("Non-fatal, ") | severities("")) & {Severity.FATAL, Severity.DEGRADED}
    assert fails <= (row.fatal.value != "no")


def test_an_error_names_the_affected_gpus(switches):
    fatal, other = hears(switches, REPORT, LINES[2][0])

    assert "all GPUs of the host" in fatal.message
    assert "does not name the GPU" in other.message
    assert "on link 32 (SXid 12028)" in other.message
    assert fatal.evidence[:2] == (REPORT, "rule: the table and the line call it fatal")


def test_the_table_states_its_source():
    assert isinstance(TABLE, Sheet)
    assert "Fabric Manager user guide" in TABLE.origin
    assert {row.sources for row in TABLE.rows.values()} <= {"G", "M", "GM"}
    assert all(row.name and row.action for row in TABLE.rows.values())


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("20034,up,no,link,fail", "only a fatal"),
        ("20034,up,fatal,link,drain", "no verdict drain"),
        ("20034,up,fatal,port,fail", "port"),
        ("x,up,fatal,link,fail", "int"),
    ],
)
def test_an_invalid_row_is_an_error_that_names_it(row, reason):
    lines = ["# source: s", "# as_of: d", "sxid,name,fatal,scope,verdict", row]

    with pytest.raises(PluginError, match=rf"SXid table mine.csv: SXid .*{reason}"):
        parse(lines, "mine.csv")


@given(st.text(max_size=40))
def test_no_text_makes_the_parser_fail(text):
    lines = (text, f"nvidia-nvswitch0: SXid{text}", f"{UP}{text}", f"[{text}")
    for fault in filter(None, map(read, lines)):
        signals = list(Switches(TABLE, (), 0.0).observe(fault, 0.0))

        assert all(signal.code.startswith("xid.sxid.") for signal in signals)


# --- in the detector ------------------------------------------------------------------------------


async def test_the_detector_reports_and_remembers_switches_and_gpus(log, tmp_path):
    found = []
    for _ in range(2):
        async with signals_of(XidDetector(log.open), XidConfig(), tmp_path) as signals:
            if not found:
                for text in (REPORT, *FOLLOWS, GPU_LOST):
                    log.write(text)
            found.append([(s.code, s.severity) for s in [await anext(signals) for _ in range(2)]])

    assert sorted(found[0]) == [("xid.79", Severity.FATAL), ("xid.sxid.20034", Severity.FATAL)]
    assert sorted(found[1]) == sorted(found[0])


async def test_a_configured_xid_table_replaces_the_shipped_one(log, tmp_path):
    mine = tmp_path / "mine.csv"
    head = "# source: ours\n# as_of: 2026\nsxid,name,fatal,scope,verdict\n"
    mine.write_text(f"{head}20034,link down,fatal,link,alert\n")
    log.write(REPORT)
    config = XidConfig(sxid_table=str(mine))
    async with signals_of(XidDetector(log.open), config, tmp_path) as signals:
        signal = await anext(signals)

    assert signal.severity is Severity.WARNING
    assert "table: ours (2026)" in signal.evidence
