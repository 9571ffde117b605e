"""How an alert is told apart from another word about the same finding."""

from __future__ import annotations

from tmd.core.model import Alert


def mark(alert: Alert) -> str:
    """The same for a repeated delivery, another one for each news about a finding.

    A finding keeps its id from raise to clear and may get worse in between, so the id alone is not
    enough.
    """
    return f"{alert.id}/{alert.state.value}/{alert.severity.value}/{alert.count}"
