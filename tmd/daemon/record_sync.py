"""Keeps this daemon's copies of job records current and pushes the directives derived from them.

The records of jobs with workers on this host are read every ``poll_s`` seconds, those of all jobs
only every 30 to 60 s, and soon after an outage of the store: a cluster may have hundreds of jobs on
ten thousand hosts. The leader reads all of them each time.

It also restores a record whose stored revision is older, and a lost one unless the job has ended. A
record that a later version of tmd wrote is reported by the leader and by each host with
workers of that job.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import structlog

from tmd.core.alerts.store_health import StoreLoop
from tmd.core.planning.election import Receipt
from tmd.core.planning.readiness import RECORD_TOO_NEW
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.model import JobRecord
from tmd.core.values.view_checks import ENDED, too_new
from tmd.daemon.agents import AgentServer
from tmd.daemon.bus import Store
from tmd.daemon.held_findings import HeldFindings, RaiseFinding
from tmd.daemon.job_records import StoredJobs
from tmd.daemon.records import Records
from tmd.daemon.roster import Roster
from tmd.daemon.store_health import StoreHealth

log = structlog.get_logger("tmd.records")

ALL_S = 60.0
"""Longest interval at which all records are read; the shortest is half of it."""
SOON_S = 5.0
"""After an outage of the store, each host reads all records at a random moment within this time."""
CLEARED_BECAUSE = {RECORD_TOO_NEW: "the record can be read, or no longer concerns this host"}


class LocalWorkers(NamedTuple):
    """The workers of this host, and what they are to do."""

    records: Records
    agents: AgentServer
    roster: Roster


class RecordSync:
    """One per daemon. It reads the records of this host's jobs at once when the roster has a new
    worker, and after :meth:`wake`."""

    def __init__(
        self,
        store: Store,
        store_health: StoreHealth,
        workers: LocalWorkers,
        *,
        poll_s: float,
        leads: Callable[[], bool] = lambda: False,
        report: RaiseFinding,
    ) -> None:
        """``leads``: whether this daemon is the leader. ``report`` raises findings about jobs."""
        self._store = store
        self._records, self._agents, self._roster = workers
        self._store_health = store_health
        self._poll_s = poll_s
        self._leads = leads
        self._findings = HeldFindings(report, CLEARED_BECAUSE)
        self._refused: dict[str, int] = {}
        """Lease epoch of the refused record that was logged last, by job."""
        self._next_full_read = -math.inf
        """Loop time at which all records are read next."""

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                await self.poll()
            except StoreUnavailable as error:
                await self._store_health.failed(StoreLoop.RECORDS, error)  # waits a while
                continue
            self._store_health.worked(StoreLoop.RECORDS)
            await self._roster.records_due.wait(self._poll_s)

    def wake(self) -> None:
        """Read the records of this host's jobs now: one may have changed."""
        self._roster.records_due.ring()

    def wake_for_all(self) -> None:
        """Read the records of this host's jobs now, and within :data:`SOON_S` those of all jobs:
        the store may have lost any of them."""
        now = asyncio.get_running_loop().time()
        self._next_full_read = min(self._next_full_read, now + random.uniform(0, SOON_S))
        self.wake()

    async def poll(self) -> None:
        """Read the records once and apply them."""
        own = frozenset(self._roster.jobs)
        now = asyncio.get_running_loop().time()
        # Taken before the read: a job that begins meanwhile must not pass for a lost one.
        known = frozenset(self._records.jobs)
        if not self._leads() and now < self._next_full_read:
            return await self._apply(await self._store.jobs_named(own), known & own)
        # Set before the read: if the store recovers meanwhile, :meth:`wake_for_all` may change it.
        self._next_full_read = now + random.uniform(ALL_S / 2, ALL_S)
        try:
            stored = await self._store.jobs()
            listed = {*stored.unread, *(record.job for record in stored.records)}
            concerned = {*own, *(known & self._records.under_way)}
            found = await self._store.jobs_named(concerned - listed)
        except StoreUnavailable:
            self._next_full_read = now
            raise
        await self._apply(stored.and_those(found), known)
        for record in found.records:
            if record.state not in ENDED:  # the list was lost, but not the record
                await self._store.restore_job(record)
        self._records.keep_epochs({*own, *listed})

    async def _apply(self, stored: StoredJobs, asked: Collection[str]) -> None:
        """``asked``: known jobs whose records were looked for."""
        records, unread = stored
        there = {*(record.job for record in records), *unread}
        to_restore = []
        for lost in [self._records.jobs[job] for job in asked if job not in there]:
            if lost.state in ENDED:
                self._records.forget(lost.job)
            else:
                to_restore.append(lost)
        for record in records:
            match self._records.take(record):
                case Receipt.OLDER:
                    to_restore.append(self._records.jobs[record.job])
                case Receipt.REFUSED:
                    self._log_refusal(record)
                case Receipt.NEW | Receipt.KNOWN:
                    self._refused.pop(record.job, None)
        self._agents.push()
        self._report_unread(unread)
        for record in to_restore:
            if await self._store.restore_job(record):
                log.warning("record restored", job=record.job, revision=record.revision)

    def _report_unread(self, unread: Sequence[str]) -> None:
        own = self._roster.jobs
        concerned = [job for job in unread if job in own or self._leads()]
        self._findings.hold({(RECORD_TOO_NEW, job): too_new(job) for job in concerned})

    def _log_refusal(self, record: JobRecord) -> None:
        if self._refused.get(record.job) != record.lease_epoch:
            self._refused[record.job] = record.lease_epoch
            event = "refused a record written by a former leader"
            log.warning(event, job=record.job, lease_epoch=record.lease_epoch)
