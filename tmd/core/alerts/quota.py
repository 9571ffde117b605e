"""Limits the findings and texts of a detector.

Detectors are third-party code. The limits keep a host's status, journal and log small. A finding
is never dropped in favour of less grave ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, convert, structs, to_builtins

from tmd.core.values.model import Severity, Signal
from tmd.core.values.printable import valid_text

MOST = 100
"""A finding is dropped if its detector has this many open ones that are at least as grave. After
they have ended the detector must report it again: nothing asks for dropped findings."""
LONGEST = 1000
"""Maximum length of a text of a signal."""
EVIDENCE = 32
"""Maximum number of evidence lines of a signal."""
TOO_MANY = "detector.too_many_findings"
"""Code of the finding that a detector has reported more findings than are kept."""
BURST = 200
PER_SECOND = 1.0
"""Findings that a detector may end at once, and per second afterwards, to slow down flapping. The
alerts of all hosts share one stream of limited length, and a webhook that takes them one by one.
"""


def fitted(signal: Signal) -> Signal:
    """``signal`` with its texts as valid Unicode, cut to the maximum lengths.

    Raises:
        ValidationError: a value is not of the type that its field has. Stored, it would make the
            status of the whole host unreadable.
    """
    signal = convert(to_builtins(signal), Signal)
    return structs.replace(
        signal,
        code=_short(signal.code),
        entity=_short(signal.entity),
        message=_short(signal.message),
        job=_short(signal.job),
        event=_short(signal.event),
        evidence=tuple(_short(line) for line in signal.evidence[:EVIDENCE]),
    )


def is_crowded(held: Iterable[Severity], severity: Severity) -> bool:
    """Whether one more finding of ``severity`` exceeds the limit beside the ``held`` ones.

    Only findings of the same detector that are at least as grave count.
    """
    return sum(other.grade >= severity.grade for other in held) >= MOST


class Allowance(Struct, frozen=True):
    """A token bucket: a burst and a rate. Times are monotonic seconds."""

    burst: float
    per_second: float
    used: float = 0.0
    at: float = 0.0

    def spent(self, now: float) -> Allowance:
        """After one more use."""
        used = max(0.0, self.used - (now - self.at) * self.per_second)
        return structs.replace(self, used=used + 1, at=now)

    def is_whole(self, now: float) -> bool:
        """Whether all tokens have come back."""
        return self.used <= (now - self.at) * self.per_second

    @property
    def owed_s(self) -> float:
        """Seconds until the next use is allowed."""
        return max(0.0, (self.used - self.burst) / self.per_second)


def _short(text: str) -> str:
    text = valid_text(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
