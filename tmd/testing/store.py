"""A store in memory that passes the same tests as the one in Redis.

One :class:`MemoryStore` stands for the Redis of a cluster; :meth:`MemoryStore.client` gives each
daemon its own connection to it. Time is the event loop's, so fake-time tests work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

from msgspec import json

from tmd.core.alerts.notices import Announced, mark
from tmd.core.planning.election import Answer, Denied, Granted
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.errors import Conflict, DrainRefused, StaleLease, StoreUnavailable
from tmd.core.values.model import Alert, ClusterView, HostStatus, JobRecord
from tmd.core.values.requests import DrainRequest, HealthyRequest, RehearsalRequest
from tmd.daemon.bus import Topic, Wake
from tmd.daemon.job_records import StoredJobs, read_record, sorted_out
from tmd.daemon.statuses import StatusReader, boot_of


class MemoryStore:
    """The data, and the faults a test wants."""

    def __init__(self) -> None:
        self.away = False
        """While true every call raises StoreUnavailable."""
        self.answers = asyncio.Event()
        """Calls wait while it is cleared, as if the server did not answer."""
        self.answers.set()
        self.waiting = 0
        """Number of calls that wait now."""
        self.unreplicated = ""
        """Why what is written now may be lost in a failover of Redis; empty if a replica has it."""
        self.clock_epoch = 1_000
        """A new lease epoch is at least this: Redis derives one from its clock. It grows with each
        :meth:`wipe`."""
        self.server_time = 1.0
        """Seconds of the server's wall clock."""
        self._listeners: set[tuple[str, asyncio.Queue[Wake | None]]] = set()
        self.stream: list[Alert] = []
        self.alerts_before_wipe = 0
        """Cursors count on from it after a :meth:`wipe`, as those of Redis do."""
        self.wipe()

    def wipe(self) -> None:
        """Restart the server without its data."""
        self.hosts: dict[str, tuple[bytes, float]] = {}
        self.records: dict[str, bytes] = {}
        self.unlisted: set[str] = set()
        self.fences: dict[str, int] = {}
        self.drains: dict[str, DrainRequest] = {}
        self.rehearsals: dict[str, RehearsalRequest] = {}
        self.healthy: dict[str, HealthyRequest] = {}
        self.paused = False
        self.breaker = Breaker()
        self.lease: tuple[str, int, float] | None = None
        self.last_epoch = 0
        self.alerts_before_wipe += len(self.stream)
        self.stream = []
        self.told: set[str] = set()
        self.sent_outside: Announced | None = None
        self.clock_epoch += 1_000

    def fall_away(self) -> None:
        """An outage: calls fail, subscriptions break. Set ``away = False`` to end it."""
        self.away = True
        for _, queue in self._listeners:
            queue.put_nowait(None)

    def client(self) -> MemoryClient:
        return MemoryClient(self)

    def wake(self, topic: Topic, about: str = "", listeners: Collection[str] | None = None) -> None:
        """``listeners``: those that get it besides clients without a name; ``None``: all."""
        for holder, queue in self._listeners:
            if not holder or listeners is None or holder in listeners:
                queue.put_nowait(Wake(topic, about))

    def wake_leader(self, topic: Topic = Topic.LEADER, about: str = "") -> None:
        self.wake(topic, about, self.lease[:1] if self.lease else ())

    async def listen(self, holder: str = "") -> AsyncIterator[Wake]:
        queue: asyncio.Queue[Wake | None] = asyncio.Queue()
        listener = (holder, queue)
        self._listeners.add(listener)
        try:
            yield Wake(Topic.ALL)
            while (wake := await queue.get()) is not None:
                yield wake
            raise StoreUnavailable("memory: away")
        finally:
            self._listeners.discard(listener)


class MemoryClient:
    """Implements :class:`tmd.daemon.bus.Store`. Hosts and records are stored encoded, as in
    Redis; all other values are immutable."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._unreplicated = ""
        self._statuses = StatusReader()

    async def _reach(self) -> float:
        store = self._store
        await asyncio.sleep(0)
        if not store.answers.is_set():
            store.waiting += 1
            try:
                await store.answers.wait()
            finally:
                store.waiting -= 1
        if store.away:
            raise StoreUnavailable("memory: away")
        return asyncio.get_running_loop().time()

    async def snapshot(self, hosts: Collection[str] | None = None) -> ClusterView:
        now = await self._reach()
        store = self._store
        alive = [n for n, (_, until) in store.hosts.items() if until > now]
        stored = await self.jobs()
        wanted = alive if hosts is None else {*hosts, *self._statuses.new(alive)}
        texts = [(n, store.hosts[n][0]) for n in alive if n in wanted]
        read = self._statuses.read(texts, [n for n in alive if n not in wanted])
        return ClusterView(
            hosts=read.hosts,
            unread=read.unread,
            jobs=stored.records,
            unread_jobs=stored.unread,
            drains=tuple(store.drains[h] for h in sorted(store.drains)),
            rehearsals=tuple(store.rehearsals[h] for h in sorted(store.rehearsals)),
            paused=store.paused,
            breaker=store.breaker,
        )

    async def clock(self) -> float:
        await self._reach()
        return self._store.server_time

    async def jobs(self) -> StoredJobs:
        await self._reach()
        records = self._store.records
        listed = sorted(records.keys() - self._store.unlisted)
        return sorted_out(read_record(records[job]) for job in listed)

    async def jobs_named(self, names: Collection[str]) -> StoredJobs:
        await self._reach()
        records = self._store.records
        return sorted_out(read_record(records[job]) for job in sorted(records) if job in names)

    async def host_boot(self, host: str) -> str | None:
        now = await self._reach()
        text, until = self._store.hosts.get(host, (b"", now))
        return boot_of(host, text) if until > now else None

    async def claim_host(self, status: HostStatus, *, ttl_s: float) -> bool:
        now = await self._reach()
        free = status.host not in self._store.hosts or self._store.hosts[status.host][1] <= now
        if free:
            self._store.hosts[status.host] = (json.encode(status), now + ttl_s)
        return free

    async def put_host(self, status: HostStatus, *, ttl_s: float, wake: bool) -> None:
        now = await self._reach()
        self._store.hosts[status.host] = (json.encode(status), now + ttl_s)
        if wake:
            self._store.wake_leader(Topic.HOST, status.host)

    async def acquire(self, holder: str, *, ttl_s: float, floor: int) -> Answer:
        now = await self._reach()
        store = self._store
        held = store.lease if store.lease and store.lease[2] > now else None
        if held is not None and held[0] != holder:
            return Denied(holder=held[0], remaining_s=held[2] - now)
        renewed = held is not None and held[1] >= floor
        fresh = max(store.last_epoch + 1, store.clock_epoch, floor + 1)
        epoch = held[1] if held is not None and renewed else fresh
        store.last_epoch = epoch
        store.lease = (holder, epoch, now + ttl_s)
        return Granted(epoch=epoch)

    async def release(self, holder: str) -> None:
        await self._reach()
        if self._store.lease and self._store.lease[0] == holder:
            self._store.lease = None
            self._store.wake(Topic.LEASE)

    async def leader(self) -> str:
        now = await self._reach()
        lease = self._store.lease
        return lease[0] if lease and lease[2] > now else ""

    async def put_job(
        self, record: JobRecord, *, expected: int, listeners: Collection[str] = ()
    ) -> None:
        await self._reach()
        fence = self._store.fences.get(record.job, 0)
        if record.lease_epoch < fence:
            raise StaleLease(f"{record.job}: written under the newer lease epoch {fence}", fence)
        stored = self._revision(record.job)
        if stored != expected:
            raise Conflict(f"{record.job}: revision is {stored}, expected {expected}")
        self._write(record, record.lease_epoch)
        self._unreplicated = self._store.unreplicated
        self._store.wake(Topic.JOBS, record.job, listeners)

    @property
    def unreplicated(self) -> str:
        return self._unreplicated

    async def look_for_replica(self) -> None:
        await self._reach()
        if self._unreplicated:
            self._unreplicated = self._store.unreplicated

    def forget_replica(self) -> None:
        self._unreplicated = ""

    async def restore_job(self, record: JobRecord) -> bool:
        await self._reach()
        if self._revision(record.job) >= record.revision:
            return False
        self._write(record, max(record.lease_epoch, self._store.fences.get(record.job, 0)))
        self._store.wake_leader()
        return True

    async def unlist_job(self, record: JobRecord) -> bool:
        await self._reach()
        if self._revision(record.job) != record.revision:
            return False
        self._store.unlisted.add(record.job)
        return True

    def _revision(self, job: str) -> int:
        stored = self._store.records.get(job)
        return read_record(stored).revision if stored else 0

    def _write(self, record: JobRecord, fence: int) -> None:
        self._store.records[record.job] = json.encode(record)
        self._store.unlisted.discard(record.job)
        self._store.fences[record.job] = fence

    async def publish_alert(self, alert: Alert) -> None:
        await self._reach()
        if mark(alert) not in self._store.told:
            self._store.told.add(mark(alert))
            self._store.stream.append(alert)

    async def holds_alert(self, alert: Alert) -> bool:
        await self._reach()
        return mark(alert) in self._store.told

    async def alerts(self, after: str, *, limit: int) -> list[tuple[str, Alert]]:
        await self._reach()
        before = self._store.alerts_before_wipe
        first = max(0, int(after or 0) - before)
        found = self._store.stream[first : first + limit]
        return [(str(before + first + n + 1), alert) for n, alert in enumerate(found)]

    async def newest_alert(self) -> str:
        await self._reach()
        stream = self._store.stream
        return str(self._store.alerts_before_wipe + len(stream)) if stream else ""

    async def announced(self) -> Announced | None:
        await self._reach()
        return self._store.sent_outside

    async def put_announced(self, announced: Announced) -> None:
        await self._reach()
        self._store.sent_outside = announced

    async def drain(self, request: DrainRequest) -> None:
        await self._reach()
        if why := request.refusal(self._store.drains.get(request.host)):
            raise DrainRefused(why)
        self._store.drains[request.host] = request
        self._store.wake_leader()

    async def undrain(self, host: str) -> bool:
        await self._reach()
        known = self._store.drains.pop(host, None) is not None
        self._store.wake_leader()
        return known

    async def swap_drain(self, host: str, seen: str, request: DrainRequest | None) -> bool:
        await self._reach()
        before = self._store.drains.get(host)
        if (before.id if before else "") != seen:
            return False
        self._store.drains.pop(host, None)
        if request is not None:
            self._store.drains[host] = request
        self._store.wake_leader()
        return True

    async def rehearse(self, request: RehearsalRequest) -> None:
        await self._reach()
        self._store.rehearsals[request.host] = request
        self._store.wake_leader()

    async def declare_healthy(self, request: HealthyRequest) -> None:
        await self._reach()
        self._store.healthy[request.id] = request
        self._store.wake(Topic.HEALTHY, request.host)

    async def healthy_requests(self) -> tuple[HealthyRequest, ...]:
        await self._reach()
        return tuple(sorted(self._store.healthy.values(), key=lambda r: (r.at, r.id)))

    async def healthy_served(self, request: HealthyRequest) -> None:
        await self._reach()
        self._store.healthy.pop(request.id, None)

    async def set_paused(self, paused: bool) -> None:
        await self._reach()
        self._store.paused = paused
        self._store.wake_leader()

    async def set_breaker(self, breaker: Breaker) -> None:
        await self._reach()
        self._store.breaker = breaker
        self._store.wake_leader()

    async def wakes(self, holder: str = "") -> AsyncIterator[Wake]:
        await self._reach()
        async for wake in self._store.listen(holder):
            yield wake

    async def close(self) -> None:
        return None
