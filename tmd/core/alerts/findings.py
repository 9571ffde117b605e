"""What triage remembers of findings: suspects, repetitions, banned hosts.

Values only. ``clock`` is monotonic seconds of the host; ``at`` for wall-clock seconds, which
do decide here: a window of days must outlive a reboot, and a clock step only moves its edge.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from tmd.core.values.model import Alert, Severity, Signal, State, Strategy

BANNED = "host.banned"
"""Code of the finding that keeps a host out of the pool of standbys until a person clears it."""
DECLARED = "host.declared_healthy"
"""Code of the record that an operator has declared a host healthy."""
TRIAGE = "triage"
"""Stands for the detector in what triage itself raises."""
DAY_S = 86_400.0
GRAVE = frozenset({Severity.DEGRADED, Severity.FATAL})
"""What may make somebody leave a host."""


class FindingKey(NamedTuple):
    """What makes two signals the same finding."""

    host: str
    detector: str
    entity: str
    code: str


class Rules(Struct, frozen=True):
    """When a finding counts, and what becomes of one that comes back."""

    hold_s: float = 0.0
    """A finding must persist this long before it raises an alert."""
    repeats: int = 0
    """Raised so often within the window: a WARNING becomes DEGRADED, and a host whose detector may
    act is banned if the finding was DEGRADED or FATAL. 0 is never."""
    window_s: float = 7 * DAY_S


AT_ONCE = Rules()
"""A finding counts when it is seen, and its coming back means nothing."""


class Origin(Struct, frozen=True):
    """Where a signal comes from and how far its findings may go."""

    host: str
    detector: str
    strategy: Strategy
    rules: Rules = AT_ONCE


class Suspect(Struct, frozen=True):
    """A finding that does not count yet."""

    signal: Signal
    origin: Origin
    alert_id: str
    since: float
    """``clock`` at its first signal."""


class Raise(Struct, frozen=True):
    """One raise of a finding that may come back."""

    key: FindingKey
    at: float


class FindingMemory(Struct, frozen=True):
    """What must outlive a restart of the daemon."""

    raises: tuple[Raise, ...] = ()
    """Of each detector oldest first, and none older than its window when the last was added."""
    ban: Alert | None = None

    def times(self, key: FindingKey, since: float) -> int:
        """How often ``key`` was raised after ``since``."""
        return sum(r.key == key and r.at > since for r in self.raises)


def is_of_host(job: str, severity: Severity) -> bool:
    """Whether a finding says something about the host itself and is more than a remark.

    What is about a worker (``job``) would be seen on any host.
    """
    return not job and severity is not Severity.INFO


def ban(origin: Origin, cause: Alert, times: int, now: float) -> Alert:
    """The finding that bans the host because ``cause`` came back so many times."""
    days = origin.rules.window_s / DAY_S
    return Alert(
        id=f"{cause.id}-ban",
        host=origin.host,
        detector=TRIAGE,
        code=BANNED,
        entity="host",
        severity=Severity.WARNING,
        state=State.RAISED,
        message=(
            f"{cause.code} of {cause.entity} was raised {times} times within {days:g} days: "
            f"no standby here is given a rank before 'tmd set-healthy {origin.host}'"
        ),
        job="",
        strategy=Strategy.ADVISE,
        count=1,
        at=now,
    )
