"""The findings that stand when a daemon stops, and what becomes of them after its next start.

Its detectors state again what still holds. That is no recurrence, and it is the same finding: it
keeps its id and its time. What they do not state again has ended meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import structs

from tmd.core.alerts.findings import BANNED, FindingKey, FindingMemory, Stood
from tmd.core.values.model import Alert, Severity, State, Strategy

LARGEST = 1000
"""Findings of a host that are kept for the next start."""
RESTATED_S = 300.0
"""Time after the start of a daemon in which its detectors state again what still holds."""
REBOOTED_S = 90.0
"""The same if the host has booted. What is found after that was not there at the start: it came
back, for example with the first load of a GPU."""


def lasting(memory: FindingMemory, raised: Mapping[FindingKey, Alert]) -> FindingMemory:
    """The memory as it is to be kept for the next start, with ``raised``."""
    stood = {each.key: each for each in memory.stood}
    stood |= {
        key: Stood(key, alert.id, alert.at, alert.severity, alert.worse_at, alert.job)
        for key, alert in raised.items()
        if key.code != BANNED
    }
    kept = tuple(stood.values())[-LARGEST:]
    return structs.replace(memory, stood=kept, standing=tuple(each.key for each in kept))


def resumed(memory: FindingMemory, boot: str) -> tuple[FindingMemory, float]:
    """The memory at the start of a daemon in the boot ``boot``, and how long its detectors have to
    state their findings again."""
    known = {each.key for each in memory.stood}
    older = (Stood(key, "", 0.0, Severity.INFO) for key in memory.standing if key not in known)
    within_s = REBOOTED_S if memory.boot and boot and memory.boot != boot else RESTATED_S
    stood = (*memory.stood, *older)
    return structs.replace(memory, stood=stood, standing=(), boot=boot), within_s


def before(memory: FindingMemory, key: FindingKey) -> Stood | None:
    """The finding ``key`` as it stood when the daemon stopped; ``None`` if it is new."""
    return next((each for each in memory.stood if each.key == key), None)


def without(memory: FindingMemory, *keys: FindingKey) -> FindingMemory:
    """The memory after these findings were stated again, or have ended."""
    return structs.replace(memory, stood=tuple(s for s in memory.stood if s.key not in keys))


def identified(alert: Alert, stood: Stood) -> Alert:
    """``alert`` as the finding that stood before, which may have become worse."""
    if not stood.id:
        return alert
    graver = alert.severity.grade > stood.severity.grade
    worse_at = alert.at if graver else stood.worse_at
    return structs.replace(alert, id=stood.id, at=stood.at, worse_at=worse_at)


def is_news(alert: Alert, stood: Stood | None) -> bool:
    """Whether a finding that is stated for the first time since the start is to be published."""
    return stood is None or not stood.id or alert.severity.grade > stood.severity.grade


def over(stood: Iterable[Stood], message: str, now: float) -> tuple[Alert, ...]:
    """The alerts that say that findings are over which were not stated again."""
    return tuple(
        Alert(
            id=each.id,
            host=each.key.host,
            detector=each.key.detector,
            code=each.key.code,
            entity=each.key.entity,
            severity=each.severity,
            state=State.CLEARED,
            message=message,
            job=each.job,
            strategy=Strategy.OBSERVE,
            count=1,
            at=now,
        )
        for each in stood
        if each.id
    )
