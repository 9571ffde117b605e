"""Turns errors of NVSwitches into signals. Pure; times are passed in.

The log does not name the GPU on a link. So an error that ends the port or the fabric is a finding
about the switch and concerns every GPU of the host: on an HGX board the switches connect them all.
Any other error is only reported and moves no rank. Ranks move only if both the table and the line
call the error fatal. Such a finding clears on a new boot or by an operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct, structs

from tmd.plugin import Severity, Signal, State

from .switchlines import StatedSeverity, SwitchFault
from .sxids import Fatality, SxidRow, SxidScope, SxidTable
from .table import XidVerdict
from .verdicts import SEVERITIES, Judgement

PREFIX = "xid.sxid."
ENTITY = "nvswitch:"
LINKS = 64
"""More are not listed."""
_FABRIC = {
    Fatality.FATAL: "all GPUs of the host are connected through this switch",
    Fatality.ALWAYS: "it ends the whole fabric of the host",
}

SwitchKey = tuple[str, int]
"""PCI address and SXid."""


class SwitchError(Struct):
    """One error of one switch."""

    signal: Signal
    seen: float
    """When it was last seen, on the detector's clock."""
    links: list[int] = []
    unreported: int = 0
    """Reports since the last signal."""

    @property
    def grave(self) -> bool:
        return self.signal.severity is Severity.FATAL

    def signal_with(self, count: int) -> Signal:
        """The signal with all links seen so far."""
        self.unreported = 0
        evidence = self.signal.evidence
        if len(self.links) > 1:
            evidence += (f"links {', '.join(map(str, sorted(self.links)))}",)
        return structs.replace(self.signal, count=count, evidence=evidence)


def judge(row: SxidRow | None, fault: SwitchFault) -> Judgement:
    """What one line means by its row and its own severity."""
    what, rule = _rule(row, fault)
    where = f" on link {fault.link}" if fault.link is not None else ""
    if row is None:
        message = f"SXid {fault.sxid} is not in the table{where}: {fault.detail or 'no text'}"
    else:
        message = f"{row.name}{where} (SXid {fault.sxid}); {row.action}"
        if what is XidVerdict.FAIL:
            message += f"; {_FABRIC[row.fatal]}"
        elif row.scope is SxidScope.LINK and fault.link is not None:
            message += "; the log does not name the GPU on the link"
    severity = SEVERITIES.get(what, Severity.INFO)
    return Judgement(what, severity, message, (fault.line, f"rule: {rule}"))


def _rule(row: SxidRow | None, fault: SwitchFault) -> tuple[XidVerdict, str]:
    fatal = fault.stated is StatedSeverity.FATAL
    if row is None:
        return XidVerdict.ALERT, "not in the table"
    if row.verdict is XidVerdict.FAIL:
        if fatal:
            return XidVerdict.FAIL, "the table and the line call it fatal"
        return XidVerdict.ALERT, "the table calls it fatal, the line does not"
    if fatal and row.fatal is Fatality.NO:
        return XidVerdict.ALERT, "the line calls it fatal, the table does not"
    return row.verdict, "by the table"


class Switches:
    """The errors that hold on the NVSwitches of this host."""

    def __init__(self, table: SxidTable, kept: Iterable[Signal], now: float) -> None:
        self._table = table
        self._standing = {_key(s): SwitchError(s, now) for s in kept}

    def restated(self) -> list[Signal]:
        """Findings from before the restart that still hold."""
        return [s.signal for s in self._standing.values()]

    def observe(self, fault: SwitchFault, now: float) -> Iterator[Signal]:
        key = (fault.pci, fault.sxid)
        known = self._standing.get(key)
        if known is not None and fault.follows:
            known.seen = now  # it describes a known error
            return
        row = self._table.rows.get(fault.sxid)
        verdict = judge(row, fault)
        if verdict.what is XidVerdict.CLEAR:
            yield from self._ended((fault.pci, row.cancels or 0) if row else key, fault)
            return
        if known is None or verdict.severity.grade > known.signal.severity.grade:
            yield self._raise(key, verdict, known, now)
        else:
            known.unreported += 1
            known.seen = now
        self._note(key, fault.link)

    def flush(self) -> Iterator[Signal]:
        """Report the counts since the last call."""
        for standing in self._standing.values():
            if standing.unreported:
                yield standing.signal_with(standing.unreported)

    def quiet(self, now: float, quiet_s: float) -> Iterator[Signal]:
        """Clear findings that move no rank and were not seen for ``quiet_s``."""
        for key, standing in list(self._standing.items()):
            if not standing.grave and now - standing.seen >= quiet_s:
                yield from self._clear(key, f"not seen for {quiet_s:g} s")

    def forget(self, code: str) -> None:
        """Forget the errors of ``code``, or all if it is empty. A later line raises them again."""
        kept = {k: s for k, s in self._standing.items() if code not in ("", s.signal.code)}
        self._standing = kept

    def grave(self) -> tuple[Signal, ...]:
        """Findings that must survive a restart of the daemon."""
        return tuple(s.signal for s in self._standing.values() if s.grave)

    def _raise(
        self, key: SwitchKey, verdict: Judgement, known: SwitchError | None, now: float
    ) -> Signal:
        pci, sxid = key
        signal = Signal(
            code=f"{PREFIX}{sxid}",
            entity=f"{ENTITY}{pci}",
            severity=verdict.severity,
            message=verdict.message,
            evidence=(*verdict.evidence, f"table: {self._table.origin}"),
            count=1,
        )
        unreported = known.unreported if known is not None else 0
        self._standing[key] = SwitchError(signal, now, known.links if known is not None else [])
        return structs.replace(signal, count=1 + unreported)

    def _note(self, key: SwitchKey, link: int | None) -> None:
        links = self._standing[key].links
        if link is not None and link not in links and len(links) < LINKS:
            links.append(link)

    def _ended(self, key: SwitchKey, fault: SwitchFault) -> Iterator[Signal]:
        if key in self._standing:
            yield from self._clear(key, f"cleared by SXid {fault.sxid}")

    def _clear(self, key: SwitchKey, why: str) -> Iterator[Signal]:
        """End a finding, unless an operator has declared it over since the last signal."""
        known = self._standing.pop(key, None)
        if known is not None:
            yield structs.replace(known.signal, state=State.CLEARED, message=why)


def _key(signal: Signal) -> SwitchKey:
    return signal.entity.removeprefix(ENTITY), int(signal.code.removeprefix(PREFIX))
