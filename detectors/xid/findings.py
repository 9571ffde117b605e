"""Turns faults into signals: what each XID means here and now. Pure; times are passed in.

A finding is reported when it is new or worse; repeats are counted and reported at most once a
period, so a storm of one line is one finding with a count. A finding that may move a rank clears
only on a recovery (XID 154 with None, its counterpart, a new boot); the others clear by silence.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, structs

from tmd.plugin import Severity, Signal, State

from .lines import XidLine
from .memory import Met, XidMemory
from .table import XidTable, XidVerdict
from .verdicts import Judgement, judge

COMPANION_S = 5.0
"""XIDs of one GPU this close in time belong together."""
REPEAT_S = 86_400.0
PROCESSES = 3
"""More distinct processes change nothing."""
DIRECTIVE = 154
LINK = 74
CONFIRMED = "an NVML event reports it as well"

XidKey = tuple[str, int]
"""PCI address and XID."""


class XidFinding(Struct):
    signal: Signal
    at: float
    """Time of its latest line, seconds since boot."""
    seen: float
    """The same by the detector's clock."""
    line: str = ""
    unreported: int = 0
    """Lines since the last signal."""

    @property
    def grave(self) -> bool:
        return self.signal.severity in (Severity.FATAL, Severity.DEGRADED)


class XidFindings:
    """The findings that hold on this host."""

    def __init__(self, table: XidTable, memory: XidMemory, now: float) -> None:
        self._table = table
        self._met: dict[tuple[str, int], dict[int, float]] = {}
        for met in memory.met:
            self._met.setdefault((met.pci, met.xid), {})[met.pid] = met.at
        self._standing: dict[XidKey, XidFinding] = {
            _key(s): XidFinding(s, at=float("-inf"), seen=now) for s in memory.standing
        }

    def restated(self) -> list[Signal]:
        """Findings from before the restart that still hold."""
        return [f.signal for f in self._standing.values()]

    def observe(self, fault: XidLine, now: float) -> Iterator[Signal]:
        known = self._standing.get((fault.pci, fault.xid))
        if known is not None and known.line == fault.line and fault.xid != LINK:
            _count(known, fault, now)  # the same text of the same process: nothing is new
            return
        row = self._table.rows.get(fault.xid)
        if row is not None and row.symptom:
            cause = self._cause(fault)
            if cause is not None:
                _count(cause, fault, now)
                return
        verdict = judge(row, fault, self._processes(fault))
        if verdict.what is XidVerdict.CLEAR:
            yield from self._ended(fault, row.cancels if row is not None else None)
            return
        if fault.xid == LINK and verdict.severity is not Severity.WARNING:
            verdict = self._without_the_other_end(fault, verdict)
        if row is None or not row.symptom:
            yield from self._symptoms_of(fault)
        yield from self._raise(fault, verdict, now)

    def confirmed(self, fault: XidLine) -> Iterator[Signal]:
        """Note that the other source reported a known fault: better evidence, not another count."""
        finding = self._standing.get((fault.pci, fault.xid))
        if finding is None or CONFIRMED in finding.signal.evidence:
            return
        evidence = (*finding.signal.evidence, CONFIRMED)
        finding.signal = structs.replace(finding.signal, evidence=evidence)
        yield structs.replace(finding.signal, count=finding.unreported)
        finding.unreported = 0

    def flush(self) -> Iterator[Signal]:
        """Report the counts since the last call."""
        for finding in self._standing.values():
            if finding.unreported:
                yield structs.replace(finding.signal, count=finding.unreported)
                finding.unreported = 0

    def quiet(self, now: float, quiet_s: float) -> Iterator[Signal]:
        """Clear findings that move no rank and were not seen for ``quiet_s``."""
        for key, finding in list(self._standing.items()):
            if not finding.grave and now - finding.seen >= quiet_s:
                yield from self._clear(key, f"not seen for {quiet_s:g} s")

    def forget(self, code: str) -> None:
        """Forget the findings of ``code``, or all if it is empty, and the processes that met them.

        A later line raises them again.
        """
        gone = [k for k, f in self._standing.items() if code in ("", f.signal.code)]
        for key in gone:
            del self._standing[key]
            self._met.pop(key, None)

    def memory(self, boot: str, seq: int | None) -> XidMemory:
        grave = tuple(f.signal for f in self._standing.values() if f.grave)
        met = tuple(
            Met(pci, xid, pid, at)
            for (pci, xid), pids in self._met.items()
            for pid, at in pids.items()
        )
        return XidMemory(boot=boot, seq=seq, standing=grave, met=met)

    # --- one line ---------------------------------------------------------------------------------

    def _raise(self, fault: XidLine, verdict: Judgement, now: float) -> Iterator[Signal]:
        key = (fault.pci, fault.xid)
        known = self._standing.get(key)
        if known is not None and not _changes(known, verdict, fault):
            _count(known, fault, now)
            return
        if known is not None and verdict.severity.grade < known.signal.severity.grade:
            yield from self._clear(key, "the driver requests a milder recovery")
        unreported = known.unreported if known is not None else 0
        signal = Signal(
            code=f"xid.{fault.xid}",
            entity=f"pci:{fault.pci}",
            severity=verdict.severity,
            message=verdict.message,
            evidence=(*verdict.evidence, f"table: {self._table.origin}"),
            count=1,
        )
        self._standing[key] = XidFinding(signal, at=fault.at, seen=now, line=fault.line)
        yield structs.replace(signal, count=1 + unreported)

    def _processes(self, fault: XidLine) -> int:
        """How many distinct processes met this XID on this GPU within a day."""
        met = self._met.setdefault((fault.pci, fault.xid), {}) if fault.pid is not None else {}
        for pid in [p for p, at in met.items() if fault.at - at > REPEAT_S]:
            del met[pid]
        if fault.pid is not None and (fault.pid in met or len(met) < PROCESSES):
            met[fault.pid] = fault.at
        return max(1, len(met))

    def _cause(self, fault: XidLine) -> XidFinding | None:
        """The latest finding of the GPU that ``fault`` may be a symptom of."""
        near = [
            f
            for (pci, xid), f in self._standing.items()
            if pci == fault.pci and not self._is_symptom(xid) and _near(f.at, fault.at)
        ]
        return max(near, key=lambda f: f.at, default=None)

    def _symptoms_of(self, fault: XidLine) -> Iterator[Signal]:
        for key, finding in list(self._standing.items()):
            ours = key[0] == fault.pci and self._is_symptom(key[1])
            if ours and _near(finding.at, fault.at):
                yield from self._clear(key, f"a symptom of XID {fault.xid}")

    def _without_the_other_end(self, fault: XidLine, verdict: Judgement) -> Judgement:
        """Both ends of a broken link report it: one fault, not two GPUs."""
        for (pci, xid), finding in self._standing.items():
            other = xid == LINK and pci != fault.pci and finding.grave
            if other and _near(finding.at, fault.at):
                message = f"{verdict.message}; may be the other end of the link of {pci}"
                return structs.replace(verdict, severity=Severity.WARNING, message=message)
        return verdict

    def _ended(self, fault: XidLine, cancels: int | None) -> Iterator[Signal]:
        """``fault`` clears one XID of its GPU; XID 154 with None all that a reset can cure."""
        for key in list(self._standing):
            row = self._table.rows.get(key[1])
            cured = fault.xid == DIRECTIVE and (row is None or row.until != "boot")
            if key[0] == fault.pci and (cured or key[1] == cancels):
                yield from self._clear(key, f"cleared by XID {fault.xid}")

    def _clear(self, key: XidKey, why: str) -> Iterator[Signal]:
        """End a finding, unless an operator has declared it over since the last signal."""
        known = self._standing.pop(key, None)
        if known is not None:
            yield structs.replace(known.signal, state=State.CLEARED, message=why)

    def _is_symptom(self, xid: int) -> bool:
        row = self._table.rows.get(xid)
        return row is not None and row.symptom


def _changes(known: XidFinding, verdict: Judgement, fault: XidLine) -> bool:
    """Worse is news; milder is news only if the driver states it, as is another remedy."""
    new, old = verdict.severity.grade, known.signal.severity.grade
    less = new < old and fault.xid == DIRECTIVE and verdict.what is XidVerdict.DRAIN
    other = fault.xid == DIRECTIVE and new == old and verdict.message != known.signal.message
    return new > old or less or other


def _count(finding: XidFinding, fault: XidLine, now: float) -> None:
    finding.unreported += 1
    finding.at = fault.at
    finding.seen = now
    if finding.signal.code == f"xid.{fault.xid}":
        return
    start = f"with XID {fault.xid}: "
    if not any(e.startswith(start) for e in finding.signal.evidence):
        evidence = (*finding.signal.evidence, start + fault.line)
        finding.signal = structs.replace(finding.signal, evidence=evidence)


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= COMPANION_S


def _key(signal: Signal) -> XidKey:
    return signal.entity.removeprefix("pci:"), int(signal.code.removeprefix("xid."))
