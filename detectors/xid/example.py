"""What the detector would say of one line of the kernel log, for a rehearsal of a fault."""

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


def first_signal(table: XidTable, xid: int, pci: str, said: str = "") -> Signal | None:
    """Of XID ``xid`` at the address ``pci``, with the driver's words behind the number; ``None``
    for one that only ends others."""
    line = f"{PREFIX}Xid (PCI:{pci.partition('.')[0]}): {xid}, {said}"
    fault = XidLineReader().take(line, 0.0)
    return next(XidFindings(table, XidMemory(), 0.0).observe(fault, 0.0), None) if fault else None


def first_of_switch(table: sxids.SxidTable, sxid: int, pci: str, said: str = "") -> Signal | None:
    """Of SXid ``sxid`` of the table on the NVSwitch at ``pci``, in a line that calls it what the
    table calls it; ``None`` for one that only ends others."""
    word = "Non-fatal" if table.rows[sxid].fatal is Fatality.NO else "Fatal"
    fault = read(f"{MARK}0: SXid (PCI:{pci}): {sxid}, {word}, {said}")
    return next(Switches(table, (), 0.0).observe(fault, 0.0), None) if fault else None
