"""Carries lost training time into the records of jobs, which outlive the daemon that counted it.

A leader adds what it has counted to each revision that it writes anyway. Until then its heartbeat
shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from msgspec import structs

from tmd.core.planning.goodput import LossCause
from tmd.core.values.model import JobRecord

DIGITS = 3


class LossLedger:
    """Lost rank seconds that are in no record yet."""

    def __init__(self) -> None:
        self._pending: dict[str, Counter[str]] = {}
        self._written: dict[str, tuple[int, int]] = {}
        """Job -> revision and lease epoch of the record that has them, if it was stored."""

    def add(self, job: str, cause: LossCause, rank_seconds: float) -> None:
        if rank_seconds > 0:
            self._pending.setdefault(job, Counter())[cause.value] += rank_seconds  # type: ignore[assignment]

    def into(self, after: JobRecord) -> JobRecord:
        """``after`` with what is in no record yet."""
        pending = self._pending.get(after.job)
        if not pending:
            return after
        self._written[after.job] = after.revision, after.lease_epoch
        total = {cause: after.lost.get(cause, 0.0) + s for cause, s in pending.items()}
        lost = {**after.lost, **{cause: round(s, DIGITS) for cause, s in total.items()}}
        return structs.replace(after, lost=lost)

    def seen(self, record: JobRecord) -> None:
        """Note the stored record. A write may succeed although its answer was lost."""
        if self._written.pop(record.job, None) == (record.revision, record.lease_epoch):
            del self._pending[record.job]

    def forget(self, jobs: Collection[str]) -> None:
        """These jobs are gone."""
        for job in jobs:
            self._pending.pop(job, None)
            self._written.pop(job, None)

    def unwritten(self) -> dict[str, dict[str, float]]:
        """job -> cause -> rank seconds."""
        return {
            job: {cause: round(s, DIGITS) for cause, s in pending.items()}
            for job, pending in self._pending.items()
        }
