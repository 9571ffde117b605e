"""Keeps the local records current and has the directives pushed that follow from them.

The records of the jobs that have workers here are read each second, those of all others about once
a minute, and soon after the store was away: a cluster may have hundreds of jobs on ten thousand
hosts.

It also restores a record that the store lost or has in an older revision, and reports records that
a later version of tmd wrote: on the hosts of the job's workers, and where the leader is.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection, Sequence

import structlog

from tmd.core.alerts.store_health import StoreLoop
from tmd.core.planning.election import Receipt
from tmd.core.planning.readiness import RECORD_TOO_NEW
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.model import JobRecord
from tmd.core.values.view_checks import too_new
from tmd.daemon.agents import AgentServer
from tmd.daemon.bus import Store
from tmd.daemon.job_findings import JobFindings, RaiseFinding
from tmd.daemon.job_records import StoredJobs
from tmd.daemon.records import Records
from tmd.daemon.roster import Roster
from tmd.daemon.store_health import StoreHealth

log = structlog.get_logger("tmd.executor")

ALL_S = 60.0
"""Longest interval at which all records are read; the shortest is half of it."""
SOON_S = 5.0
"""Within it all records are read after the store was away, by each host at its own moment."""
OVER = {RECORD_TOO_NEW: "the record can be read, or no longer concerns this host"}


class Executor:
    """One per daemon. It reads at once when the roster has a new worker, or ``look`` is called."""

    def __init__(
        self,
        store: Store,
        records: Records,
        agents: AgentServer,
        store_health: StoreHealth,
        roster: Roster,
        *,
        poll_s: float,
        leads: Callable[[], bool] = lambda: False,
        report: RaiseFinding = lambda _: None,
    ) -> None:
        """``leads``: whether this daemon is the leader. ``report`` raises findings about jobs."""
        self._store = store
        self._records = records
        self._agents = agents
        self._store_health = store_health
        self._poll_s = poll_s
        self._roster = roster
        self._leads = leads
        self._findings = JobFindings(report, OVER)
        self._refused: dict[str, int] = {}
        self._all_at = -math.inf
        """When all records are due."""

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                await self.turn()
            except StoreUnavailable as error:
                await self._store_health.failed(StoreLoop.RECORDS, error)
                continue
            self._store_health.worked(StoreLoop.RECORDS)
            await self._roster.records_due.wait(self._poll_s)

    def look(self) -> None:
        """Read the records of the jobs that have workers here at once: one may have changed."""
        self._roster.records_due.ring()

    def look_at_all(self) -> None:
        """Read the records of the jobs that have workers here at once, and soon those of all: the
        store may have lost any."""
        now = asyncio.get_running_loop().time()
        self._all_at = min(self._all_at, now + random.uniform(0, SOON_S))
        self.look()

    async def turn(self) -> None:
        """Read the records once and apply them."""
        own = self._roster.jobs
        now = asyncio.get_running_loop().time()
        if self._leads() or now >= self._all_at:
            stored, asked = await self._store.jobs(), {*self._records.jobs}
            self._all_at = now + random.uniform(ALL_S / 2, ALL_S)
        else:
            stored, asked = await self._store.jobs_named(own), self._records.jobs.keys() & own
        await self._apply(stored, asked)

    async def _apply(self, stored: StoredJobs, asked: Collection[str]) -> None:
        """``asked``: known jobs whose records were looked for."""
        records, unread = stored
        there = {*(record.job for record in records), *unread}
        lost = [self._records.jobs[job] for job in asked if job not in there]
        for record in records:
            match self._records.take(record):
                case Receipt.OLDER:
                    lost.append(self._records.jobs[record.job])
                case Receipt.REFUSED:
                    self._log_refusal(record)
                case Receipt.NEW | Receipt.KNOWN:
                    self._refused.pop(record.job, None)
        self._agents.push()
        self._report_unread(unread)
        for record in lost:
            if await self._store.restore_job(record):
                log.warning("record restored", job=record.job, revision=record.revision)

    def _report_unread(self, unread: Sequence[str]) -> None:
        own = self._roster.jobs
        concerned = [job for job in unread if job in own or self._leads()]
        self._findings.hold({(RECORD_TOO_NEW, job): too_new(job) for job in concerned})

    def _log_refusal(self, record: JobRecord) -> None:
        if self._refused.get(record.job) != record.lease_epoch:
            self._refused[record.job] = record.lease_epoch
            why = "record of an older leader refused"
            log.warning(why, job=record.job, lease_epoch=record.lease_epoch)
