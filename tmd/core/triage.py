"""From signals to alerts: what is new, what is a repetition, what is over.

Pure: ids and times are passed in. A finding is keyed by (detector, entity, code) on one host; it is
raised once, counts its repetitions, and ends only by an explicit CLEARED, never by silence.
"""

from __future__ import annotations

from msgspec import Struct, structs

from tmd.core.model import Alert, Severity, Signal, State, Strategy

Key = tuple[str, str, str]

_RANK = {severity: rank for rank, severity in enumerate(Severity)}


class Origin(Struct, frozen=True):
    """Where a signal comes from and how far its findings may go."""

    host: str
    detector: str
    strategy: Strategy


class Board(Struct, frozen=True):
    """The findings raised on one host."""

    raised: dict[Key, Alert] = {}

    @property
    def alerts(self) -> tuple[Alert, ...]:
        return tuple(self.raised.values())


def fold(
    board: Board, signal: Signal, origin: Origin, *, alert_id: str, now: float
) -> tuple[Board, Alert | None]:
    """The board after ``signal``, and the alert to publish if there is news.

    News is: raised for the first time, raised again but worse, cleared. ``alert_id`` is used for a
    new finding only; a finding keeps its id from raise to clear.
    """
    key = (origin.detector, signal.entity, signal.code)
    known = board.raised.get(key)
    if signal.state is State.CLEARED:
        return _cleared(board, key, known, signal, now)
    if known is None:
        alert = _raised(signal, origin, alert_id, now)
        return Board({**board.raised, key: alert}), alert
    worse = _RANK[signal.severity] > _RANK[known.severity]
    again = structs.replace(
        known,
        count=known.count + signal.count,
        severity=signal.severity if worse else known.severity,
        message=signal.message or known.message,
        evidence=signal.evidence or known.evidence,
        strategy=origin.strategy,
    )
    return Board({**board.raised, key: again}), again if worse else None


def _cleared(
    board: Board, key: Key, known: Alert | None, signal: Signal, now: float
) -> tuple[Board, Alert | None]:
    if known is None:
        return board, None
    rest = {k: a for k, a in board.raised.items() if k != key}
    message = signal.message or known.message
    return Board(rest), structs.replace(known, state=State.CLEARED, message=message, at=now)


def _raised(signal: Signal, origin: Origin, alert_id: str, now: float) -> Alert:
    return Alert(
        id=alert_id,
        host=origin.host,
        detector=origin.detector,
        code=signal.code,
        entity=signal.entity,
        severity=signal.severity,
        state=State.RAISED,
        message=signal.message,
        job=signal.job,
        strategy=origin.strategy,
        count=signal.count,
        at=now,
        evidence=signal.evidence,
    )
