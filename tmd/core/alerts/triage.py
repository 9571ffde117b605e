"""Turns signals into alerts: new, repeated, cleared and recurring findings.

Pure: ids and times are passed in. A finding is keyed by host, detector, entity and code. It counts
after its hold time, is raised once, counts its repetitions, and ends only by an explicit CLEARED or
by an operator, never by silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec import Struct, structs

from tmd.core.alerts import restarts
from tmd.core.alerts.findings import (
    BANNED,
    DECLARED,
    LEADER,
    TRIAGE,
    WHOLE_HOST,
    FindingKey,
    FindingMemory,
    Origin,
    Raise,
    Suspect,
    ban,
    banned_for,
    is_of_host,
)
from tmd.core.alerts.quota import TOO_MANY, fitted, is_crowded
from tmd.core.values.model import Alert, Severity, Signal, State, Strategy
from tmd.core.values.requests import HealthyRequest

REMEMBERED = 1000
"""Remembered raises per detector."""
SKEW_S = 60.0
"""Largest difference between the clocks of two hosts that is taken for normal."""
NewAlerts = tuple[Alert, ...]
"""Alerts to publish: raised for the first time, raised again but worse, cleared."""


class FindingsBoard(Struct, frozen=True):
    """The findings of one host."""

    raised: dict[FindingKey, Alert] = {}
    suspects: dict[FindingKey, Suspect] = {}
    memory: FindingMemory = FindingMemory()
    since: float | None = None
    """Monotonic time of the first check after a restart, if findings stood before it."""
    restated_s: float = restarts.RESTATED_S
    """Time from then on in which detectors state again what still holds."""

    @property
    def alerts(self) -> tuple[Alert, ...]:
        return tuple(self.raised.values())

    @property
    def lasting(self) -> FindingMemory:
        """The memory as it is to be kept for the next start."""
        return restarts.lasting(self.memory, self.raised)


def restored(memory: FindingMemory, host: str, boot: str = "") -> FindingsBoard:
    """The board of a daemon that starts in the boot ``boot``: a ban stays, and detectors report
    their findings again."""
    raised = {} if memory.ban is None else {_ban_key(host): memory.ban}
    memory, within_s = restarts.resumed(memory, boot)
    return FindingsBoard(raised=raised, memory=memory, restated_s=within_s)


def fold(
    board: FindingsBoard, signal: Signal, origin: Origin, *, alert_id: str, now: float, clock: float
) -> tuple[FindingsBoard, NewAlerts]:
    """The board after ``signal``, and the alerts to publish.

    ``alert_id`` is used for a new finding only; a finding keeps its id from raise to clear. ``now``
    is wall-clock time, ``clock`` monotonic seconds.
    """
    signal = fitted(signal)
    key = FindingKey(origin.host, origin.detector, signal.entity, signal.code)
    if signal.state is State.CLEARED:
        board, news = _cleared(board, key, signal.message, now)
        board, more = _relieved(board, key, now)
        return board, news + more
    if key in board.raised:
        return _repeated(board, key, signal, origin, now)
    suspect = board.suspects.get(key)
    if suspect is None and is_crowded(_held(board, key), signal.severity):
        word = _too_many(key)
        whose = Origin(origin.host, TRIAGE, Strategy.ADVISE)
        own = f"{alert_id}-more"
        return fold(board, word, whose, alert_id=own, now=now, clock=clock)
    if suspect is None:
        suspect = Suspect(signal, origin, alert_id, since=clock)
    else:
        suspect = structs.replace(suspect, signal=_merged(suspect.signal, signal), origin=origin)
    board = structs.replace(board, suspects={**board.suspects, key: suspect})
    return _counted(board, key, now, clock)


def ripened(board: FindingsBoard, *, now: float, clock: float) -> tuple[FindingsBoard, NewAlerts]:
    """The board with every suspect raised whose hold time is over."""
    board, ended = _awaited(board, now, clock)
    news = [*ended]
    for key in tuple(board.suspects):
        board, more = _counted(board, key, now, clock)
        news += more
    return board, tuple(news)


def declared_healthy(
    board: FindingsBoard, request: HealthyRequest, now: float
) -> tuple[FindingsBoard, NewAlerts]:
    """End the findings of a code, or all, and forget their history, for an operator.

    Those of the leader stay: they are not about the host, and end by themselves. So do findings
    that are newer than the request, which a daemon may get late: the operator has not seen them.
    With a ban the history of its cause is forgotten, since else the next raise would ban the host
    again. A record of it is always published: the operator, the time and the ended findings.
    """
    host, code, until = request.host, request.code, _seen_until(request, now)

    def is_over(key: FindingKey, at: float) -> bool:
        return code in ("", key.code) and key.detector != LEADER and at <= until

    message = f"declared healthy by {request.by or 'somebody'}"
    ended = [k for k, a in board.raised.items() if is_over(k, max(a.at, a.reached_at))]
    stood = [s for s in board.memory.stood if is_over(s.key, max(s.at, s.worse_at or s.at))]
    news = [*restarts.over(stood, message, now)]
    for key in ended:
        board, cleared = _cleared(board, key, message, now)
        board, relieved = _relieved(board, key, now)
        news += cleared + relieved
    memory = board.memory
    kept = None if memory.ban is None or is_over(_ban_key(host), memory.ban.at) else memory.ban
    cause = banned_for(memory.ban) if memory.ban is not None and kept is None else ""
    raises = tuple(r for r in memory.raises if not (is_over(r.key, r.at) or r.key.code == cause))
    # What is not raised yet, the operator has not seen either. It is dropped with the rest, unless
    # the request is late.
    suspects = {k: s for k, s in board.suspects.items() if not is_over(k, now)}
    memory = structs.replace(memory, raises=raises, ban=kept)
    memory = restarts.without(memory, *(each.key for each in stood))
    board = structs.replace(board, suspects=suspects, memory=memory)
    codes = {key.code for key in (*ended, *(each.key for each in stood))}
    what = ", ".join(sorted(codes)) or "nothing was raised"
    if kept_codes := {key.code for key in newer(board, request, now)}:
        what += f"; raised since, and kept: {', '.join(sorted(kept_codes))}"
    return board, (*news, _record(request, f"{message}: {what}", now))


def newer(board: FindingsBoard, request: HealthyRequest, now: float) -> list[FindingKey]:
    """The findings that have outlived a request, since it was served late."""
    if now <= _seen_until(request, now):
        return []
    keys = (key for key in board.raised if request.code in ("", key.code))
    return [key for key in keys if key.detector != LEADER]


def _record(request: HealthyRequest, message: str, now: float) -> Alert:
    return Alert(
        id=f"{request.host}-healthy-{request.id}",
        host=request.host,
        detector=TRIAGE,
        code=DECLARED,
        entity=request.code or WHOLE_HOST,
        severity=Severity.INFO,
        state=State.CLEARED,
        message=message,
        job="",
        strategy=Strategy.OBSERVE,
        count=1,
        at=now,
    )


def _seen_until(request: HealthyRequest, now: float) -> float:
    """The wall-clock time up to which the operator can have known of findings; infinite if the
    request is served at once, or an earlier release has left its time out."""
    latest = request.at + SKEW_S
    return latest if request.at and now > latest else math.inf


# --- one finding ----------------------------------------------------------------------------------


def _counted(
    board: FindingsBoard, key: FindingKey, now: float, clock: float
) -> tuple[FindingsBoard, NewAlerts]:
    """Raise a suspect after its hold time. One that stood before a restart has not come back."""
    suspect = board.suspects[key]
    if clock - suspect.since < suspect.origin.rules.hold_s:
        return board, ()
    origin, rules = suspect.origin, suspect.origin.rules
    memory = board.memory
    alert = _raised(suspect, now)
    times = 0
    stood = restarts.before(memory, key)
    memory = restarts.without(memory, key)
    if rules.repeats and is_of_host(alert.job, alert.severity):
        since = now - rules.window_s
        if stood is None:
            memory = structs.replace(memory, raises=_with(memory.raises, Raise(key, now), since))
        times = memory.times(key, since)
    came_back = rules.repeats and times >= rules.repeats
    shown = _escalated(alert, times) if came_back else alert
    if stood is not None:
        shown = restarts.identified(shown, stood)
    news = [shown] if restarts.is_news(shown, stood) else []
    raised = {**board.raised, key: shown}
    grave = alert.severity is not Severity.WARNING and origin.strategy is Strategy.ACT
    if came_back and grave and memory.ban is None and stood is None:
        news.append(ban(origin, alert, times, now))
        memory = structs.replace(memory, ban=news[-1])
        raised[_ban_key(origin.host)] = news[-1]
    suspects = {k: s for k, s in board.suspects.items() if k != key}
    return structs.replace(board, raised=raised, suspects=suspects, memory=memory), tuple(news)


def _awaited(board: FindingsBoard, now: float, clock: float) -> tuple[FindingsBoard, NewAlerts]:
    """A finding that stood before a restart and is not stated again soon has ended meanwhile."""
    if not board.memory.stood:
        return board, ()
    if board.since is None:
        return structs.replace(board, since=clock), ()
    if clock - board.since < board.restated_s:
        return board, ()
    ended = [each for each in board.memory.stood if each.key not in board.suspects]
    memory = restarts.without(board.memory, *(each.key for each in ended))
    news = restarts.over(ended, "not found again since the daemon was started", now)
    return structs.replace(board, memory=memory), news


def _with(raises: Sequence[Raise], new: Raise, since: float) -> tuple[Raise, ...]:
    """Add ``new``; keep only the detector's newest raises, none from before ``since``."""
    own = [r for r in raises if r.key.detector == new.key.detector and r.at > since]
    others = (r for r in raises if r.key.detector != new.key.detector)
    return (*others, *own[1 - REMEMBERED :], new)


def _escalated(alert: Alert, times: int) -> Alert:
    if alert.severity is not Severity.WARNING:
        return alert
    evidence = (*alert.evidence, f"raised {times} times")
    return structs.replace(
        alert, severity=Severity.DEGRADED, stated=alert.severity, evidence=evidence
    )


def _repeated(
    board: FindingsBoard, key: FindingKey, signal: Signal, origin: Origin, now: float
) -> tuple[FindingsBoard, NewAlerts]:
    known = board.raised[key]
    graver = signal.severity.grade > known.severity.grade
    again = structs.replace(
        known,
        count=known.count + signal.count,
        severity=signal.severity if graver else known.severity,
        stated=None if signal.severity is known.severity or graver else known.stated,
        message=signal.message or known.message,
        evidence=signal.evidence or known.evidence,
        strategy=origin.strategy,
        worse_at=now if graver else known.worse_at,
    )
    board = structs.replace(board, raised={**board.raised, key: again})
    return board, (again,) if graver else ()


def _cleared(
    board: FindingsBoard, key: FindingKey, message: str, now: float
) -> tuple[FindingsBoard, NewAlerts]:
    if key in board.suspects:
        suspects = {k: s for k, s in board.suspects.items() if k != key}
        board = structs.replace(board, suspects=suspects)
    known = board.raised.get(key)
    if known is None:
        return board, ()
    rest = {k: a for k, a in board.raised.items() if k != key}
    over = structs.replace(known, state=State.CLEARED, message=message or known.message, at=now)
    return structs.replace(board, raised=rest), (over,)


def _merged(first: Signal, second: Signal) -> Signal:
    """Merge two signals of a suspect: the graver one, with the sum of both counts."""
    graver = second if second.severity.grade >= first.severity.grade else first
    return structs.replace(graver, count=first.count + second.count)


def _raised(suspect: Suspect, now: float) -> Alert:
    signal, origin = suspect.signal, suspect.origin
    return Alert(
        id=suspect.alert_id,
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


# --- too many -------------------------------------------------------------------------------------


def _held(board: FindingsBoard, key: FindingKey) -> Iterator[Severity]:
    """Severities of the open findings of the detector of ``key``."""
    yield from (a.severity for a in board.raised.values() if a.detector == key.detector)
    yield from (s.signal.severity for k, s in board.suspects.items() if k.detector == key.detector)


def _too_many(key: FindingKey) -> Signal:
    message = f"more open findings than tmd keeps; the last dropped was {key.code} of {key.entity}"
    return Signal(TOO_MANY, f"detector:{key.detector}", Severity.WARNING, message=message)


def _relieved(board: FindingsBoard, key: FindingKey, now: float) -> tuple[FindingsBoard, NewAlerts]:
    """Clear the overflow finding once all other findings of the detector have ended."""
    if any(True for _ in _held(board, key)):
        return board, ()
    word = FindingKey(key.host, TRIAGE, f"detector:{key.detector}", TOO_MANY)
    return _cleared(board, word, "all findings of the detector are over", now)


def _ban_key(host: str) -> FindingKey:
    return FindingKey(host, TRIAGE, "host", BANNED)
