"""What one line may lead to, by its row of the table, its own text and its repetitions."""

from __future__ import annotations

from msgspec import Struct

from tmd.plugin import Severity

from .lines import NvlinkLine, XidLine, link, says_fatal
from .table import XidRow, XidVerdict

SEVERITIES = {
    XidVerdict.FAIL: Severity.FATAL,
    XidVerdict.DRAIN: Severity.DEGRADED,
    XidVerdict.ALERT: Severity.WARNING,
    XidVerdict.NOTE: Severity.INFO,
}
INSPECT = {(149, 4): "the cartridge", (149, 10): "the physical layer"}
"""Sub-codes of an NVLink event for which a reset is not enough."""

LINK_EVENTS = ("NETIR_LINK_EVT", "NETIR_LINK_DOWN")
"""The unit whose sub-codes the table judges: NVIDIA renamed it."""


class Judgement(Struct, frozen=True):
    what: XidVerdict
    severity: Severity
    message: str
    """Human reason and next step."""
    evidence: tuple[str, ...] = ()


def judge(row: XidRow | None, fault: XidLine, processes: int) -> Judgement:
    """``processes``: how many different ones met the XID on this GPU within a day."""
    what, rule = _rule(row, fault, processes)
    if row is None:
        message = f"XID {fault.xid} is not in the table: {fault.detail or 'no text'}"
    else:
        message = f"{row.meaning} (XID {fault.xid}); {_next_step(row, fault)}"
    if row is not None and what in (row.second, row.third) and processes > 1:
        message += f"; met by {processes} processes within a day"
    return Judgement(
        what=what,
        severity=SEVERITIES.get(what, Severity.INFO),
        message=message,
        evidence=tuple(_evidence(fault, rule)),
    )


def _rule(row: XidRow | None, fault: XidLine, processes: int) -> tuple[XidVerdict, str]:
    if row is None:
        return XidVerdict.ALERT, "not in the table"
    if row.verdict is XidVerdict.TEXT:
        return asked(fault.detail), "by the text of the line"
    exempt = _by_subcode(row, fault)
    if exempt is not None:
        return exempt
    if row.fatal is not None and says_fatal(fault):
        return row.fatal, "the line calls it fatal"
    if row.third is not None and processes >= 3:
        return row.third, "third process within a day"
    if row.second is not None and processes >= 2:
        return row.second, "second process within a day"
    return row.verdict, "by the table"


def _by_subcode(row: XidRow, fault: XidLine) -> tuple[XidVerdict, str] | None:
    decoded = link(fault)
    if decoded is None or decoded.subcode is None or decoded.unit not in LINK_EVENTS:
        return None
    verdict = row.by_subcode().get(decoded.subcode)
    return None if verdict is None else (verdict, f"by the table: sub-code {decoded.subcode}")


def asked(text: str) -> XidVerdict:
    """XID 154: the recovery the driver now requests. The text names the old and the new one."""
    action = text.lower().rpartition(" to ")[2]
    if "drain" in action:
        return XidVerdict.DRAIN
    if "reset" in action or "reboot" in action:
        return XidVerdict.FAIL
    return XidVerdict.CLEAR if "none" in action else XidVerdict.ALERT


def _next_step(row: XidRow, fault: XidLine) -> str:
    decoded = link(fault)
    part = INSPECT.get((fault.xid, decoded.subcode or 0)) if decoded is not None else None
    if part is not None:
        return f"inspect {part}"
    return fault.detail if row.verdict is XidVerdict.TEXT else row.action


def _evidence(fault: XidLine, rule: str) -> list[str]:
    found = [fault.line, f"rule: {rule}"]
    if fault.pid is not None:
        found.append(f"process {fault.pid} {fault.process}".rstrip())
    if fault.instance:
        found.append(f"instance {fault.instance}")
    decoded = link(fault)
    if decoded is not None:
        found.append(_spelled(decoded))
    return found


def _spelled(decoded: NvlinkLine) -> str:
    words = [f"NVLink unit {decoded.unit}", "fatal" if decoded.fatal else "not fatal"]
    if decoded.number is not None:
        words.append(f"link {decoded.number}")
    if decoded.words:
        words.append(f"sub-code {decoded.subcode}")
    return ", ".join(words)
