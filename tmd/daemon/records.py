"""The records this daemon obeys: the newest seen, never one of an older leader (I5).

The directives for this host's trainers and the workers to kill follow from them alone.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from tmd.core.planning.directives import directive_of
from tmd.core.planning.election import Receipt, received
from tmd.core.planning.migration import is_live
from tmd.core.values.model import JobRecord, PlanKind
from tmd.core.values.view_checks import ENDED
from tmd.daemon.state_file import StateFile
from tmd.wire import DirectiveOrder

MANY = 1000
"""Up to this many lease epochs are kept, also those of jobs that ended long ago."""


class Records:
    """Newest record per job. The highest lease epoch obeyed per job is kept across restarts."""

    def __init__(self, state_dir: Path) -> None:
        self._file = StateFile(state_dir / "obeyed.json", "the lease epochs")
        self._obeyed = self._file.read(dict[str, int], {})
        self.jobs: dict[str, JobRecord] = {}

    @property
    def obeyed(self) -> int:
        """Highest lease epoch obeyed for any job."""
        return max(self._obeyed.values(), default=0)

    @property
    def under_way(self) -> set[str]:
        """Jobs that have not ended, as far as known."""
        return {record.job for record in self.jobs.values() if record.state not in ENDED}

    def take(self, record: JobRecord) -> Receipt:
        """Obey ``record`` if it is newer than the known one."""
        known, obeyed = self.jobs.get(record.job), self._obeyed.get(record.job, 0)
        receipt = received(record, known, obeyed)
        if receipt is Receipt.NEW:
            self.jobs[record.job] = record
            self._obey(record)
        return receipt

    def forget(self, job: str) -> None:
        """Forget a job that has ended and is not listed any more."""
        del self.jobs[job]

    def keep_epochs(self, listed: Collection[str]) -> None:
        """Write the lease epochs to disk if it did not take them.

        Once there are many, keep those of jobs that are listed or have not ended, and one that is
        the highest: the next leader gets one above it.
        """
        self._file.write_again()
        if len(self._obeyed) <= MANY:
            return
        highest = max(self._obeyed, key=lambda job: self._obeyed[job])
        kept = {*listed, *self.under_way, highest}
        left = {job: epoch for job, epoch in self._obeyed.items() if job in kept}
        if len(left) < len(self._obeyed):
            self._obeyed = left
            self._write()

    def _obey(self, record: JobRecord) -> None:
        if record.lease_epoch > self._obeyed.get(record.job, 0):
            self._obeyed[record.job] = record.lease_epoch
            self._write()

    def _write(self) -> None:
        self._file.write(msgspec.json.encode(self._obeyed))

    def order(self, job: str, worker: str) -> DirectiveOrder | None:
        """The order for ``worker``; ``None`` while its job is unknown."""
        record = self.jobs.get(job)
        if record is None:
            return None
        return DirectiveOrder(
            lease_epoch=record.lease_epoch,
            revision=record.revision,
            directive=directive_of(record, worker),
        )

    def recovers(self, job: str) -> bool:
        """Whether a failover of ``job`` is under way."""
        record = self.jobs.get(job)
        plan = None if record is None else record.plan
        return plan is not None and plan.kind is PlanKind.FAILOVER and is_live(plan)

    def condemned(self, worker: str, job: str) -> str | None:
        """Why the launcher must kill ``worker``, or ``None``."""
        record = self.jobs.get(job)
        return condemned(record, worker) if record is not None else None


def condemned(record: JobRecord, worker: str) -> str | None:
    """Why ``worker`` must be killed: a failover has named it dead, so it must not come back."""
    for plan in (record.plan, *reversed(record.history)):
        if plan is not None and plan.kind is PlanKind.FAILOVER and worker in plan.dead:
            return f"named dead by plan {plan.id}: {plan.reason}"
    return None
