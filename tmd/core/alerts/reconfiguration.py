"""Adapts the board of findings to a changed configuration of a detector."""

from __future__ import annotations

from msgspec import structs

from tmd.core.alerts.findings import Suspect
from tmd.core.alerts.injection import injector
from tmd.core.alerts.triage import FindingsBoard
from tmd.core.values.model import Signal, State, Strategy


def lesser(one: Strategy, other: Strategy) -> Strategy:
    """The one that permits less."""
    return min(one, other, key=[*Strategy].index)


def with_strategy(board: FindingsBoard, detector: str, strategy: Strategy) -> FindingsBoard:
    """Limit all findings of ``detector``, raised or suspected, to ``strategy``; injected ones under
    its name as well."""
    names = (detector, injector(detector))
    raised = {
        key: structs.replace(alert, strategy=strategy) if key.detector in names else alert
        for key, alert in board.raised.items()
    }
    suspects = {
        key: _retuned(suspect, strategy) if key.detector in names else suspect
        for key, suspect in board.suspects.items()
    }
    return structs.replace(board, raised=raised, suspects=suspects)


def _retuned(suspect: Suspect, strategy: Strategy) -> Suspect:
    return structs.replace(suspect, origin=structs.replace(suspect.origin, strategy=strategy))


def farewells(board: FindingsBoard, detector: str, message: str) -> list[Signal]:
    """Signals that clear everything that ``detector`` has raised or suspects."""
    severities = {key: alert.severity for key, alert in board.raised.items()}
    severities |= {key: suspect.signal.severity for key, suspect in board.suspects.items()}
    return [
        Signal(key.code, key.entity, severity, State.CLEARED, message)
        for key, severity in severities.items()
        if key.detector == detector
    ]
