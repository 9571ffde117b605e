"""How much may be said: by a detector, and in a log.

Detectors are other people's code. Whatever they state, a host's status, its journal and its log
stay small, and what is graver is never kept out by what is not.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, structs

from tmd.core.values.model import Severity, Signal

MOST = 100
"""A finding is left out if so many that are at least as grave are held of its detector. Once they
have ended it must be stated again: nobody asks a detector what it had left out."""
LONGEST = 1000
"""Characters of a text of a signal."""
EVIDENCE = 32
"""Lines of evidence of a signal."""
TOO_MANY = "detector.too_many_findings"
"""Code of the finding that a detector has stated more than is held."""
BURST = 200
PER_SECOND = 10.0
"""Findings that a detector may end at once, and afterwards: one that flaps waits."""


def fitted(signal: Signal) -> Signal:
    """``signal`` with texts of bounded length."""
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
    """Whether one more of ``severity`` is too many beside the ``held`` of the same detector.

    Only those count that are at least as grave.
    """
    return sum(other.grade >= severity.grade for other in held) >= MOST


class Allowance(Struct, frozen=True):
    """What may be done at once, and how fast more may be. Times are monotonic seconds."""

    burst: float
    per_second: float
    used: float = 0.0
    at: float = 0.0

    def spent(self, now: float) -> Allowance:
        """After one more."""
        used = max(0.0, self.used - (now - self.at) * self.per_second)
        return structs.replace(self, used=used + 1, at=now)

    def is_whole(self, now: float) -> bool:
        """Whether all that was used has come back."""
        return self.used <= (now - self.at) * self.per_second

    @property
    def owed_s(self) -> float:
        """How long to wait until that much is allowed."""
        return max(0.0, (self.used - self.burst) / self.per_second)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
