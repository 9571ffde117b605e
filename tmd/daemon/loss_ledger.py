"""Carries lost training time into the records of jobs, which outlive the daemon that counted it.

A leader adds what it has counted to each revision that it writes anyway. Until then its heartbeat
shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from msgspec import Struct, structs

from tmd.core.planning.goodput import LossCause
from tmd.core.values.model import Credit, JobRecord

DIGITS = 3
CREDITS = 8
"""Most lease epochs that a record credits."""


class UnconfirmedRevision(Struct, frozen=True):
    """A revision that may have been stored, and what it adds."""

    lease_epoch: int
    revision: int
    lost: Mapping[str, float]
    """Cause -> rank seconds."""

    def stored_in(self, record: JobRecord) -> bool:
        """Whether ``record``, of no earlier revision, is this one or follows from it."""
        if record.lease_epoch == self.lease_epoch:
            # This leader wrote it, and continues only from what it has written. 'tmd forget' writes
            # under this lease epoch, too. After it the losses of the job do not matter.
            return True
        if record.revision == self.revision:
            return False
        last = {c.lease_epoch: c.revision for c in record.credited}
        if self.lease_epoch in last:
            return last[self.lease_epoch] >= self.revision
        # Forgotten ones count as stored: a loss must not be shown twice.
        return len(last) >= CREDITS and self.lease_epoch < min(last)


class LossLedger:
    """Lost rank seconds that are in no record yet."""

    def __init__(self) -> None:
        self._pending: dict[str, Counter[str]] = {}
        self._attempts: dict[str, list[UnconfirmedRevision]] = {}
        """By job: attempts of which it is not known whether they were stored."""

    def add(self, job: str, cause: LossCause, rank_seconds: float) -> None:
        if rank_seconds > 0:
            self._pending.setdefault(job, Counter())[cause.value] += rank_seconds  # type: ignore[assignment]

    def into(self, after: JobRecord) -> JobRecord:
        """``after`` with what is in no record yet. The same revision gets the same again: a write
        whose answer was lost may arrive later than its repetition."""
        attempt = self._attempt(after)
        if attempt is None:
            return after
        total = {cause: after.lost.get(cause, 0.0) + s for cause, s in attempt.lost.items()}
        lost = {**after.lost, **{cause: round(s, DIGITS) for cause, s in total.items()}}
        others = (c for c in after.credited if c.lease_epoch != after.lease_epoch)
        credited = sorted(
            (*others, Credit(after.lease_epoch, after.revision)), key=lambda c: c.lease_epoch
        )
        return structs.replace(after, lost=lost, credited=tuple(credited[-CREDITS:]))

    def _attempt(self, after: JobRecord) -> UnconfirmedRevision | None:
        known = self._attempts.get(after.job, [])
        for attempt in known:
            if (attempt.revision, attempt.lease_epoch) == (after.revision, after.lease_epoch):
                return attempt
        pending = self._pending.get(after.job)
        if not pending:
            return None
        attempt = UnconfirmedRevision(after.lease_epoch, after.revision, dict(pending))
        self._attempts[after.job] = [*known, attempt]
        return attempt

    def seen(self, record: JobRecord) -> None:
        """Note the stored record: each attempt up to its revision was stored, or never will be."""
        known = self._attempts.pop(record.job, [])
        if later := [a for a in known if a.revision > record.revision]:
            self._attempts[record.job] = later
        for attempt in known:
            if attempt not in later and attempt.stored_in(record):
                self._settle(record.job, attempt.lost)

    def look(self, records: Mapping[str, JobRecord]) -> None:
        """Note the stored ``records``, by job, whoever has written them."""
        for job in self._attempts.keys() & records.keys():
            self.seen(records[job])

    def _settle(self, job: str, lost: Mapping[str, float]) -> None:
        left = Counter(self._pending.pop(job, Counter()))
        left.subtract(lost)
        if rest := Counter({cause: s for cause, s in left.items() if s > 0}):
            self._pending[job] = rest

    def forget(self, jobs: Collection[str]) -> None:
        """These jobs are gone."""
        for job in jobs:
            self._pending.pop(job, None)
            self._attempts.pop(job, None)

    def unwritten(self) -> dict[str, dict[str, float]]:
        """job -> cause -> rank seconds."""
        return {
            job: {cause: round(s, DIGITS) for cause, s in pending.items()}
            for job, pending in self._pending.items()
        }
