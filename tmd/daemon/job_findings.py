"""Findings about jobs: raised when they begin or change, cleared when they end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tmd.core.values.model import Severity, Signal, State

RaiseFinding = Callable[[Signal], None]
Finding = tuple[str, str]
"""Code and job."""


class JobFindings:
    """Findings of one part of the daemon. ``report`` raises and clears them on this host."""

    def __init__(self, report: RaiseFinding, over: Mapping[str, str]) -> None:
        """``over``: for each code, why it has ended if nothing else is known."""
        self._report = report
        self._over = over
        self.raised: Mapping[Finding, str] = {}
        """Those that hold, and the message of each."""

    def hold(self, found: Mapping[Finding, str], over: str = "") -> None:
        """From now on ``found`` holds and nothing else. ``over``: why the others have ended."""
        for finding in self.raised.keys() - found.keys():
            self._report(_signal(finding, State.CLEARED, over or self._over[finding[0]]))
        for finding, why in found.items():
            if self.raised.get(finding) != why:
                self._report(_signal(finding, State.RAISED, why))
        self.raised = found


def _signal(finding: Finding, state: State, message: str) -> Signal:
    code, job = finding
    return Signal(code, f"job:{job}", Severity.WARNING, state, message, job=job)
