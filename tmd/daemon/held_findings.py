"""Findings about jobs or policies: raised when they begin or change, cleared when they end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tmd.core.values.model import Severity, Signal, State

RaiseFinding = Callable[[Signal], None]
Finding = tuple[str, str]
"""Code, and the name of the job or policy."""


class HeldFindings:
    """Findings of one part of the daemon. ``report`` raises and clears them on this host."""

    def __init__(self, report: RaiseFinding, over: Mapping[str, str], kind: str = "job") -> None:
        """``over``: for each code, why it has ended if nothing else is known. ``kind``: what the
        findings are about."""
        self._report = report
        self._over = over
        self._kind = kind
        self.raised: Mapping[Finding, str] = {}
        """Those that hold, and the message of each."""

    def hold(self, found: Mapping[Finding, str], over: str = "") -> None:
        """From now on ``found`` holds and nothing else. ``over``: why the others have ended."""
        for finding in self.raised.keys() - found.keys():
            self._report(self._signal(finding, State.CLEARED, over or self._over[finding[0]]))
        for finding, why in found.items():
            if self.raised.get(finding) != why:
                self._report(self._signal(finding, State.RAISED, why))
        self.raised = found

    def _signal(self, finding: Finding, state: State, message: str) -> Signal:
        code, name = finding
        job = name if self._kind == "job" else ""
        return Signal(code, f"{self._kind}:{name}", Severity.WARNING, state, message, job=job)
