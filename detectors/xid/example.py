"""The signal for an example line of the kernel log, for the rehearsal of a fault."""

from __future__ import annotations

from tmd.plugin import Signal

from . import sxids
from .findings import XidFindings
from .lines import PREFIX, XidLineReader
from .memory import XidMemory
from .switches import Switches
from .switchlines import MARK, read
from .sxids import Fatality
from .table import XidTable


def first_signal(table: XidTable, xid: int, pci: str, text: str = "") -> Signal | None:
    """The signal for XID ``xid`` at the address ``pci``, with the driver's text after the number;
    ``None`` for one that only clears others."""
    line = f"{PREFIX}Xid (PCI:{pci.partition('.')[0]}): {xid}, {text}"
    fault = XidLineReader().take(line, 0.0)
    return next(XidFindings(table, XidMemory(), 0.0).observe(fault, 0.0), None) if fault else None


def first_of_switch(table: sxids.SxidTable, sxid: int, pci: str, text: str = "") -> Signal | None:
    """The signal for SXid ``sxid`` of the NVSwitch at ``pci``, in a line with the severity that the
    table has for it; ``None`` for one that only clears others."""
    word = "Non-fatal" if table.rows[sxid].fatal is Fatality.NO else "Fatal"
    fault = read(f"{MARK}0: SXid (PCI:{pci}): {sxid}, {word}, {text}")
    return next(Switches(table, (), 0.0).observe(fault, 0.0), None) if fault else None
