"""Findings that an operator injects, to rehearse how the cluster would react to real ones.

Pure. An injected finding belongs to a separate detector, ``injected:<detector>``, so that it never
counts into, ends or hides a finding of the real detector. It has the strategy and hold time of that
detector, but its repetitions are not remembered: a rehearsal must not ban a host.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from msgspec import structs

from tmd.core.alerts import triage
from tmd.core.alerts.findings import AT_ONCE, BANNED, DECLARED, FindingKey, FindingRules, Origin
from tmd.core.values.model import Alert, Severity, Signal, State

PREFIX = "injected:"
MARK = "INJECTED"
LONGEST = 1000
"""Maximum length of its texts, which are part of every heartbeat of the host."""
MOST = 32
"""Maximum number of injected findings per host, for the same reason."""


def injector(detector: str) -> str:
    """The detector name under which findings of ``detector`` are injected."""
    return PREFIX + detector


def detector_of(code: str) -> str:
    """The detector of ``code``: the word before its first dot."""
    return code.partition(".")[0]


def refusal(signal: Signal, for_s: float, detectors: Collection[str]) -> str:
    """Why ``signal`` cannot be injected on a host with these detectors; empty if it can."""
    detector, _, rest = signal.code.partition(".")
    if not rest or detector not in detectors:
        names = ", ".join(sorted(detectors)) or "none is enabled"
        return (
            f"no detector here reports '{signal.code}': a code is the name of a detector, a dot "
            f"and a word, as 'tmd status' shows them; detectors are {names}"
        )
    if signal.code in (BANNED, DECLARED):
        return f"'{signal.code}' is reserved for triage"
    if not signal.entity:
        return "an entity is needed: what the finding is about"
    if len(signal.evidence) > MOST:
        return f"it may have {MOST} lines of evidence at most"
    if max(map(len, (signal.code, signal.entity, signal.message, *signal.evidence))) > LONGEST:
        return f"code, entity, message and evidence may have {LONGEST} characters at most"
    if not (math.isfinite(for_s) and for_s >= 0):
        return "its duration must be a number of seconds, or 0"
    return ""


def marked(signal: Signal, by: str, for_s: float) -> Signal:
    """``signal`` as it is raised, marked so that every reader recognises a rehearsal."""
    lasts = f"for {for_s:g} s" if for_s else "until cleared"
    return structs.replace(
        signal,
        state=State.RAISED,
        message=f"{MARK} by {by}: {signal.message}".rstrip(": "),
        evidence=(f"injected by {by} {lasts}: a rehearsal, nothing was found", *signal.evidence),
        count=1,
    )


def forgetful(rules: FindingRules) -> FindingRules:
    """``rules`` of a detector for injected findings: same hold time, never counted for a ban."""
    return structs.replace(rules, repeats=0)


def standing(
    board: triage.FindingsBoard, code: str = "", entity: str = ""
) -> dict[FindingKey, Severity]:
    """Injected findings, raised or within their hold time: of ``code`` (or that detector) and
    ``entity``; empty for any."""
    found = {key: suspect.signal.severity for key, suspect in board.suspects.items()}
    found |= {key: alert.severity for key, alert in board.raised.items()}
    return {
        key: severity
        for key, severity in found.items()
        if key.detector.startswith(PREFIX)
        and code in ("", key.code, detector_of(key.code))
        and entity in ("", key.entity)
    }


def foretold(board: triage.FindingsBoard, signal: Signal, origin: Origin, *, now: float) -> Alert:
    """The alert that ``signal`` raises on ``board`` after its hold time."""
    at_once = structs.replace(origin, rules=AT_ONCE)
    after, _ = triage.fold(board, signal, at_once, alert_id="", now=now, clock=math.inf)
    return after.raised[FindingKey(origin.host, origin.detector, signal.entity, signal.code)]


def unended(published: Sequence[Alert]) -> list[Alert]:
    """Injected alerts that were not cleared, of alerts in the order of their publication."""
    open_: dict[str, Alert] = {}
    for alert in published:
        if alert.detector.startswith(PREFIX):
            open_.pop(alert.id, None)
            if alert.state is State.RAISED:
                open_[alert.id] = alert
    return list(open_.values())
