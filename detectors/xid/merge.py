"""Decides which of two sources reports a fault. Pure; times are passed in.

The log does if it can be read: its lines carry process and text, while an event carries only a
number and, in a burst, repeats the last one. So an event waits a moment for its line and is judged
only if none comes. They are matched by time of arrival, as their clocks drift apart.
"""

from __future__ import annotations

from .lines import XidLine
from .xid_event import XidEvent

MERGE_S = 2.0
"""A line and an event this close in time are one fault."""
UNNAMED = 999
"""NVML's number for an XID without a number of its own; the log has the true one."""
ACTIONS = {
    0: "None",
    1: "GPU reset",
    2: "node reboot",
    3: "drain P2P",
    4: "drain and reset",
    5: "reset of the IMEX domain",
    6: "bus reset",
    7: "system reboot",
}
"""Recovery actions (NVML field 230) as the lines of XID 154 name them."""


class Merge:
    """``patience_s``: how long an event waits for its line; 0 where the log is not read."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._lines: dict[tuple[str, int], float] = {}
        self._waiting: dict[tuple[str, int], tuple[float, XidLine]] = {}

    def line(self, fault: XidLine, now: float) -> bool:
        """Take in a line; return whether an event has reported it before."""
        waited = False
        for key in ((fault.pci, fault.xid), (fault.pci, UNNAMED)):
            self._lines[key] = now
            waited = self._waiting.pop(key, None) is not None or waited
        return waited

    def event(self, fault: XidLine, now: float) -> bool:
        """Take in an event; return whether a line has reported it before."""
        key = (fault.pci, fault.xid)
        if now - self._lines.get(key, float("-inf")) <= MERGE_S:
            return True
        since, _ = self._waiting.get(key, (now, fault))
        self._waiting[key] = (since, fault)
        return False

    def alone(self, now: float) -> list[XidLine]:
        """Events without a line, each once."""
        self._lines = {k: at for k, at in self._lines.items() if now - at <= MERGE_S}
        found = [k for k, (at, _) in self._waiting.items() if now - at >= self._patience_s]
        return [self._waiting.pop(key)[1] for key in found]


def fault(event: XidEvent, now: float) -> XidLine:
    """An event as if it were a line."""
    detail = "NVML has no number for it" if event.xid == UNNAMED else ""
    if event.action is not None:
        action = ACTIONS.get(event.action, f"action {event.action}")
        detail = f"NVML field 230: GPU recovery action changed to {action}"
    line = f"NVML event: XID {event.xid} of {event.pci}{', ' if detail else ''}{detail}"
    return XidLine(event.pci, event.xid, now, instance=event.instance, detail=detail, line=line)
