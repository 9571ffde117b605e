"""What the detector would say of one line of the kernel log: for who rehearses a fault."""

from __future__ import annotations

from tmd.plugin import Signal

from .findings import Findings
from .lines import PREFIX, Reader
from .memory import Memory
from .table import Table


def first_signal(table: Table, xid: int, pci: str, said: str = "") -> Signal | None:
    """Of XID ``xid`` at the address ``pci``, with the driver's words behind the number; ``None``
    for one that only ends others."""
    line = f"{PREFIX}Xid (PCI:{pci.partition('.')[0]}): {xid}, {said}"
    fault = Reader().take(line, 0.0)
    return next(Findings(table, Memory(), 0.0).observe(fault, 0.0), None) if fault else None
