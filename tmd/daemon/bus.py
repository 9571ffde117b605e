"""What the daemon needs of a store, whatever keeps it.

Two implementations pass the same tests: ``RedisStore`` and ``tmd.testing.MemoryStore``. Every call
may raise :class:`StoreUnavailable`; callers back off and read again, they never queue commands.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Any, Protocol

import msgspec
from msgspec import structs

from tmd.core.alerts.notices import Announced
from tmd.core.planning.election import Answer
from tmd.core.planning.readiness import unprotected
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.model import Alert, ClusterView, HostStatus, JobRecord
from tmd.core.values.requests import DrainRequest, HealthyRequest, RehearsalRequest


class Topic(StrEnum):
    """What a wake-up is about. A hint only: whoever misses it re-reads on its period."""

    HOSTS = "hosts"  # a host has something to say that cannot wait
    JOBS = "jobs"  # a record changed
    LEASE = "lease"  # the leader stepped down
    ALL = "all"  # anything: an operator's request, a restored record, a new subscription


class Store(Protocol):
    """Shared memory of the cluster."""

    async def snapshot(self) -> ClusterView:
        """One consistent look at everything."""

    async def jobs(self) -> tuple[JobRecord, ...]:
        """The records alone."""

    async def put_host(self, status: HostStatus, *, ttl_s: float, wake: bool) -> None:
        """Heartbeat; the status vanishes ``ttl_s`` after the last one."""

    async def acquire(self, holder: str, *, ttl_s: float, floor: int) -> Answer:
        """Take or renew the lease. A new lease epoch is above ``floor`` and all earlier ones."""

    async def release(self, holder: str) -> None:
        """Give the lease back if ``holder`` has it."""

    async def leader(self) -> str:
        """Present holder of the lease, or an empty string."""

    async def put_job(self, record: JobRecord, *, expected: int) -> None:
        """Store ``record`` if the stored revision is ``expected`` (0: there is none).

        Raises:
            StaleLease: the job has been written under a higher lease epoch than the record's.
            Conflict: the stored revision is another one.
        """

    async def restore_job(self, record: JobRecord) -> bool:
        """Store ``record`` if the store lost it or has an older revision; whether it did."""

    async def publish_alert(self, alert: Alert) -> None:
        """Publish on the alert channel and append to the alert stream, unless that was done
        before: see :func:`tmd.core.alerts.notices.mark`."""

    async def holds_alert(self, alert: Alert) -> bool:
        """Whether it was published here, or may have been so long ago that the store forgot it.
        Not so although it was: the store has lost its data."""

    async def alerts(self, after: str, *, limit: int) -> list[tuple[str, Alert]]:
        """Alerts of the stream after cursor ``after`` ('' = from the oldest), with cursors."""

    async def newest_alert(self) -> str:
        """Cursor of the newest alert; '' if there is none."""

    async def told(self) -> Announced | None:
        """What people outside were told; ``None``: nothing was ever noted."""

    async def put_told(self, told: Announced) -> None: ...

    async def drain(self, request: DrainRequest) -> None: ...

    async def undrain(self, host: str) -> bool:
        """Withdraw a request; whether there was one."""

    async def rehearse(self, request: RehearsalRequest) -> None:
        """Ask the standbys of a host for a rehearsal; replaces an earlier request for it."""

    async def declare_healthy(self, request: HealthyRequest) -> None:
        """Ask the daemon of a host to end findings; it stays until ``healthy_served``."""

    async def healthy_requests(self) -> tuple[HealthyRequest, ...]:
        """Those that no daemon has served, oldest first."""

    async def healthy_served(self, request: HealthyRequest) -> None:
        """Take the request away."""

    async def set_paused(self, paused: bool) -> None: ...

    async def set_breaker(self, breaker: Breaker) -> None:
        """Open or close the circuit breaker. Not fenced: who opens it makes others do less."""

    def wakes(self) -> AsyncIterator[Topic]:
        """Wake-ups as they come, beginning with one ``ALL``."""

    async def close(self) -> None: ...


async def state_of(store: Store) -> dict[str, Any]:
    """Everything the cluster knows of itself, for programs: the view, who leads, and what jobs lack
    to survive the next loss."""
    view = await store.snapshot()
    gaps = [gap for record in view.jobs if (gap := unprotected(view, record)) is not None]
    shown = {"unprotected": gaps, **structs.asdict(view)}
    return {"leader": await store.leader(), **msgspec.to_builtins(shown)}


class WakeEvent:
    """A wake-up that is never lost and never counted."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()

    async def heard(self, timeout_s: float) -> bool:
        """Wait until rung, at most ``timeout_s``; whether it was."""
        if not self._event.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()
            except TimeoutError:
                return False
        self._event.clear()
        return True
