"""The board of findings when the configuration of a detector changes."""

from __future__ import annotations

from msgspec import structs

from tmd.core.model import Signal, State, Strategy
from tmd.core.triage import Board


def with_strategy(board: Board, detector: str, strategy: Strategy) -> Board:
    """What ``detector`` has raised goes only as far as ``strategy`` from now on."""
    return Board(
        {
            key: structs.replace(alert, strategy=strategy) if alert.detector == detector else alert
            for key, alert in board.raised.items()
        }
    )


def farewells(board: Board, detector: str, message: str) -> list[Signal]:
    """Signals that clear all that ``detector`` has raised: nobody else would."""
    return [
        Signal(
            code=alert.code,
            entity=alert.entity,
            severity=alert.severity,
            state=State.CLEARED,
            message=message,
        )
        for alert in board.alerts
        if alert.detector == detector
    ]
