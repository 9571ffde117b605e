"""The interface of the store that the daemon uses.

Two implementations pass the same tests: ``RedisStore`` and ``tmd.testing.MemoryStore``. Every call
may raise :class:`StoreUnavailable`. Callers back off and read again; they never queue commands.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import structs

from tmd.core.alerts.notices import Announced
from tmd.core.planning.election import Answer
from tmd.core.planning.readiness import unprotected
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.model import Alert, ClusterView, HostStatus, JobRecord
from tmd.core.values.requests import DrainRequest, HealthyRequest, RehearsalRequest
from tmd.daemon.job_records import StoredJobs

UNLISTED_S = 30 * 86400.0
"""For how long the record of an ended job is kept after it was taken off the list."""


class Topic(StrEnum):
    """Subject of a wake-up. It is only a hint: every loop also reads again on its own period."""

    HOST = "host"  # a change in the status of a host: the leader and observers hear of it
    LEADER = "leader"  # a request or a restored record: the leader and observers hear of it
    JOBS = "jobs"  # the record of a job changed: the hosts of its workers hear of it
    LEASE = "lease"  # the leader stepped down
    HEALTHY = "healthy"  # a request to clear findings of a host
    ALL = "all"  # anything: a new subscription, or a wake-up of another version


class Wake(NamedTuple):
    topic: Topic
    about: str = ""
    """The job whose record changed, or the host; empty if that is not known."""


class Store(Protocol):
    """Shared state of the cluster."""

    async def snapshot(self, hosts: Collection[str] | None = None) -> ClusterView:
        """One consistent view of everything.

        ``hosts``: read only their statuses, and those of hosts that this client has not read yet.
        Of the others the view has what was read last, as long as they are there.
        """

    async def clock(self) -> float:
        """Wall-clock seconds of the store's own clock."""

    async def jobs(self) -> StoredJobs:
        """The job records alone."""

    async def jobs_named(self, names: Collection[str]) -> StoredJobs:
        """The records of these jobs, as far as there are any: what a host reads of a cluster with
        many jobs."""

    async def host_boot(self, host: str) -> str | None:
        """The boot of the daemon whose heartbeat is stored for ``host``: empty if that daemon does
        not write it, or no member wrote the heartbeat; ``None`` if none is stored."""

    async def claim_host(self, status: HostStatus, *, ttl_s: float) -> bool:
        """Write the first heartbeat of a host if none is stored; return whether it did."""

    async def put_host(self, status: HostStatus, *, ttl_s: float, wake: bool) -> None:
        """Write the heartbeat; the status expires after ``ttl_s``."""

    async def acquire(self, holder: str, *, ttl_s: float, floor: int) -> Answer:
        """Take or renew the lease. A new lease epoch is above ``floor`` and all earlier ones."""

    async def release(self, holder: str) -> None:
        """Give the lease back if ``holder`` holds it."""

    async def leader(self) -> str:
        """Current holder of the lease, or an empty string."""

    async def put_job(
        self, record: JobRecord, *, expected: int, listeners: Collection[str] = ()
    ) -> None:
        """Store ``record`` if the stored revision is ``expected`` (0: there is none), and wake the
        daemons that listen under the names ``listeners``.

        Raises:
            StaleLease: the job has been written under a higher lease epoch than the record's.
            Conflict: the stored revision differs.
        """

    @property
    def unreplicated(self) -> str:
        """Why the latest record or lease may be lost if Redis fails over; empty if it is not, or if
        Redis has no replica."""

    async def look_for_replica(self) -> None:
        """Bring ``unreplicated`` up to date between writes: a replica may have caught up. It asks
        at most every few seconds, and not at all while replicas have every write in time."""

    def forget_replica(self) -> None:
        """Take nothing that was seen of replicas for granted, and clear ``unreplicated``."""

    async def restore_job(self, record: JobRecord) -> bool:
        """Store ``record`` if the store lost it or has an older revision; return whether it did."""

    async def unlist_job(self, record: JobRecord) -> bool:
        """Take an ended job off the list, unless its revision differs from that of ``record``;
        return whether it did. ``jobs_named`` still finds the record for :data:`UNLISTED_S`: a new
        run continues its revisions, and a host that was away learns that the job has ended."""

    async def publish_alert(self, alert: Alert) -> None:
        """Publish on the alert channel and append to the alert stream, unless the store already has
        this alert: see :func:`tmd.core.alerts.notices.mark`."""

    async def holds_alert(self, alert: Alert) -> bool:
        """Whether the alert was published to this store, or may have been and has since expired.
        False for a published alert means that the store has lost its data."""

    async def alerts(self, after: str, *, limit: int) -> list[tuple[str, Alert]]:
        """Alerts of the stream after cursor ``after`` ('' = from the oldest), with cursors."""

    async def newest_alert(self) -> str:
        """Cursor of the newest alert; '' if there is none."""

    async def announced(self) -> Announced | None:
        """What the webhook has announced; ``None`` if nothing was ever recorded."""

    async def put_announced(self, announced: Announced) -> None: ...

    async def drain(self, request: DrainRequest) -> None:
        """Request a drain, in place of the present one of the host.

        Raises:
            DrainRefused: that one promises more: see :meth:`DrainRequest.refusal`.
        """

    async def undrain(self, host: str) -> bool:
        """Withdraw a request; return whether there was one."""

    async def swap_drain(self, host: str, seen: str, request: DrainRequest | None) -> bool:
        """Set the drain of ``host``, or withdraw it, if the present one has the id ``seen`` (empty:
        if there is none). Returns whether it had."""

    async def rehearse(self, request: RehearsalRequest) -> None:
        """Ask the standbys of a host for a rehearsal; replaces an earlier request."""

    async def declare_healthy(self, request: HealthyRequest) -> None:
        """Ask the daemon of a host to clear findings; it stays until ``healthy_served``."""

    async def healthy_requests(self) -> tuple[HealthyRequest, ...]:
        """Requests that no daemon has served yet, oldest first."""

    async def healthy_served(self, request: HealthyRequest) -> None:
        """Remove the request."""

    async def set_paused(self, paused: bool) -> None: ...

    async def set_breaker(self, breaker: Breaker) -> None:
        """Open or close the circuit breaker. Not fenced: opening it can only prevent actions."""

    def wakes(self, holder: str = "") -> AsyncIterator[Wake]:
        """Wake-ups as they arrive, starting with one ``ALL``.

        ``holder``: the name of the daemon that listens. It hears what is for the leader while it
        holds the lease; an observer, without a name, hears all.
        """

    async def close(self) -> None: ...


async def state_of(store: Store) -> dict[str, Any]:
    """Everything the cluster knows, for programs."""
    return described(await store.snapshot(), await store.leader())


def described(view: ClusterView, leader: str) -> dict[str, Any]:
    """The view, the leader, and what each job lacks to survive its next loss."""
    gaps = [gap for record in view.jobs if (gap := unprotected(view, record)) is not None]
    shown = {"unprotected": gaps, **structs.asdict(view)}
    return {"leader": leader, **msgspec.to_builtins(shown)}


class WakeEvent:
    """Keeps a wake-up until it is waited for; several count as one."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` until it rings; return whether it did."""
        if not self._event.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()
            except TimeoutError:
                return False
        self._event.clear()
        return True
