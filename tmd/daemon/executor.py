"""Keeps the local records current and has the directives pushed that follow from them.

It also restores a record that the store lost or has in an older revision.
"""

from __future__ import annotations

import structlog

from tmd.core.alerts.store_health import StoreLoop
from tmd.core.planning.election import Receipt
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.model import JobRecord
from tmd.core.values.view_checks import too_new
from tmd.daemon.agents import AgentServer
from tmd.daemon.bus import Store, WakeEvent
from tmd.daemon.records import Records
from tmd.daemon.store_health import StoreHealth

log = structlog.get_logger("tmd.executor")


class Executor:
    """One per daemon. ``bell`` rings when a record may have changed."""

    def __init__(
        self,
        store: Store,
        records: Records,
        agents: AgentServer,
        store_health: StoreHealth,
        *,
        poll_s: float,
    ) -> None:
        self.bell = WakeEvent()
        self._store = store
        self._records = records
        self._agents = agents
        self._store_health = store_health
        self._poll_s = poll_s
        self._refused: dict[str, int] = {}

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                await self.turn()
            except StoreUnavailable as error:
                await self._store_health.failed(StoreLoop.RECORDS, error)
                continue
            self._store_health.worked(StoreLoop.RECORDS)
            await self.bell.wait(self._poll_s)

    async def turn(self) -> None:
        """Read the records once and apply them."""
        stored = {record.job: record for record in await self._store.jobs()}
        lost = [r for job, r in self._records.jobs.items() if job not in stored]
        for record in stored.values():
            match self._records.take(record):
                case Receipt.OLDER:
                    lost.append(self._records.jobs[record.job])
                case Receipt.REFUSED:
                    self._log_refusal(record, "record of an older leader refused")
                case Receipt.TOO_NEW:
                    self._log_refusal(record, too_new(record.job))
                case Receipt.NEW | Receipt.KNOWN:
                    self._refused.pop(record.job, None)
        self._agents.push()
        for record in lost:
            if await self._store.restore_job(record):
                log.warning("record restored", job=record.job, revision=record.revision)

    def _log_refusal(self, record: JobRecord, why: str) -> None:
        if self._refused.get(record.job) != record.lease_epoch:
            self._refused[record.job] = record.lease_epoch
            log.warning(why, job=record.job, lease_epoch=record.lease_epoch)
