"""Triage's memory of findings: suspects, repetitions, banned hosts.

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
WHOLE_HOST = "host"
"""Entity of a record about all codes of a host; that of one about a single code is the code."""
TRIAGE = "triage"
"""Detector name of findings that triage itself raises."""
LEADER = "leader"
"""Detector name of the leader's findings, which are about the cluster, on the leader's host."""
RECURRING = "recurring finding: "
"""Beginning of the evidence of a ban."""
DAY_S = 86_400.0
GRAVE = frozenset({Severity.DEGRADED, Severity.FATAL})
"""Severities for which a rank may be moved off a host."""


class FindingKey(NamedTuple):
    """Identity of a finding: signals with equal keys are about the same one."""

    host: str
    detector: str
    entity: str
    code: str


class FindingRules(Struct, frozen=True):
    """Hold time of a finding, and the consequences of repetitions."""

    hold_s: float = 0.0
    """A finding must persist this long before it raises an alert."""
    repeats: int = 0
    """Number of raises within the window after which a WARNING becomes DEGRADED, and a host whose
    detector may act is banned for a DEGRADED or FATAL finding. 0 is never."""
    window_s: float = 7 * DAY_S


AT_ONCE = FindingRules()
"""No hold time, and no consequence of repetitions."""


class Origin(Struct, frozen=True):
    """Host and detector of a signal, and the strategy for its findings."""

    host: str
    detector: str
    strategy: Strategy
    rules: FindingRules = AT_ONCE


class Suspect(Struct, frozen=True):
    """A finding whose hold time is not over."""

    signal: Signal
    origin: Origin
    alert_id: str
    since: float
    """``clock`` at the first signal."""


class Raise(Struct, frozen=True):
    """One raise of a finding, remembered to count repetitions."""

    key: FindingKey
    at: float


class Stood(Struct, frozen=True):
    """A finding that stood when the daemon stopped."""

    key: FindingKey
    id: str
    """That of its alert; empty if an earlier release has written the memory."""
    at: float
    severity: Severity
    worse_at: float | None = None
    job: str = ""


class FindingMemory(Struct, frozen=True):
    """Memory that must survive a restart of the daemon."""

    raises: tuple[Raise, ...] = ()
    """Each detector's raises, oldest first, none older than its window at the latest raise."""
    ban: Alert | None = None
    standing: tuple[FindingKey, ...] = ()
    """The keys of ``stood``, for an earlier release. Only set in a file."""
    stood: tuple[Stood, ...] = ()
    """Findings that stood when the daemon stopped, and were not stated again since its start."""
    boot: str = ""
    """The boot of the host in which the memory was written."""

    def times(self, key: FindingKey, since: float) -> int:
        """Number of raises of ``key`` after ``since``."""
        return sum(r.key == key and r.at > since for r in self.raises)


def is_of_host(job: str, severity: Severity) -> bool:
    """Whether a finding is about the host itself and more than a remark.

    Trouble of a worker (``job``) would appear on any host.
    """
    return not job and severity is not Severity.INFO


def ban(origin: Origin, cause: Alert, times: int, now: float) -> Alert:
    """The finding that bans the host because ``cause`` was raised ``times`` times."""
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
        evidence=(f"{RECURRING}{cause.code}",),
    )


def banned_for(ban: Alert) -> str:
    """Code of the finding for which ``ban`` was raised; empty if an earlier release raised it."""
    found = (each for each in ban.evidence if each.startswith(RECURRING))
    return next(found, "").removeprefix(RECURRING)


def declared_code(record: Alert) -> str:
    """Code of the findings that an operator has declared to be over; empty for all."""
    return "" if record.entity == WHOLE_HOST else record.entity
