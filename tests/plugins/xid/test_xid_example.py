"""The signal for an example line."""

from __future__ import annotations

from tmd_detectors.xid.example import first_signal
from tmd_detectors.xid.findings import XidFindings
from tmd_detectors.xid.lines import XidLineReader
from tmd_detectors.xid.memory import XidMemory
from tmd_detectors.xid.table import XidVerdict, load

from tmd.plugin import Severity

TABLE = load()
PCI = "0000:3b:00.0"


def test_an_example_signal_equals_that_of_the_detector():
    """An XID that only clears others gives none."""
    for xid, row in TABLE.rows.items():
        fault = XidLineReader().take(f"NVRM: Xid (PCI:0000:3b:00): {xid}, ", 0.0)
        (*found,) = XidFindings(TABLE, XidMemory(), 0.0).observe(fault, 0.0)

        assert first_signal(TABLE, xid, PCI) == (found[0] if found else None)
        assert bool(found) == (row.verdict is not XidVerdict.CLEAR)


def test_the_text_of_the_driver_counts():
    asks = "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"

    assert first_signal(TABLE, 154, PCI, asks).severity is Severity.FATAL
    assert first_signal(TABLE, 154, PCI).severity is Severity.WARNING
