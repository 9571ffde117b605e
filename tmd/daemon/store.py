"""The store in Redis.

Every change that depends on what is stored is one Lua script (:mod:`tmd.daemon.lua`). Values are
sealed JSON (:mod:`tmd.daemon.codec`): people can read them with ``redis-cli``, and only members can
seal them. Leases, counters, sets and the marks of alerts and of a pause have no seal. A forged
request, host status or alert is ignored; a forged record or breaker stops decisions, since doing
less is the only safe reaction. A daemon that has read or written a record keeps it until the
revision, fence or seal changes, and does not notice a forged text that leaves these alone. The
client never retries by itself: a blocked renewal would outlive the lease.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

from redis.exceptions import RedisError

from tmd.config import Settings
from tmd.core.alerts.notices import Announced, mark
from tmd.core.planning.election import Answer, Denied, Granted
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.errors import Conflict, DrainRefused, StaleLease, StoreUnavailable
from tmd.core.values.model import Alert, ClusterView, HostStatus, JobRecord
from tmd.core.values.requests import DrainRequest, HealthyRequest, RehearsalRequest
from tmd.daemon import lua, lua_records, redis_errors
from tmd.daemon.bus import UNLISTED_S, Topic, Wake
from tmd.daemon.codec import Codec, paired, text
from tmd.daemon.job_records import Known, ReadRecord, RecordReader, StoredJobs, demands, marks
from tmd.daemon.key_types import misplaced_keys
from tmd.daemon.redis_client import connect, disconnect
from tmd.daemon.replication import Replication, longest_wait
from tmd.daemon.scripts import Scripts
from tmd.daemon.statuses import StatusReader, boot_of
from tmd.daemon.wake_ups import check_cancellation, listen

ALERTS_KEPT = 100_000
PROBE_MS = 1000

Request = TypeVar("Request", DrainRequest, RehearsalRequest)


class RedisStore:
    """Implements :class:`tmd.daemon.bus.Store`. Closed by :meth:`close`."""

    def __init__(
        self,
        url: str,
        cluster: str,
        key: bytes,
        *,
        timeout_s: float = 2.0,
        alerts_kept: int = ALERTS_KEPT,
        replica_wait_s: float | None = None,
    ) -> None:
        self._redis = connect(url, timeout_s)
        self._scripts = Scripts(self._redis)
        wait_s = replica_wait_s or longest_wait(timeout_s)
        self._replication = Replication(self._redis, self._scripts, wait_s)
        self._place = redis_errors.shown(url)
        self._cluster = cluster
        self._alerts_kept = alerts_kept
        self._prefix = f"{{tmd:{cluster}}}:"
        self._codec = Codec(key, self._prefix)
        self._statuses = StatusReader(partial(self._codec.note_forged, HostStatus))
        self._records = RecordReader(self._codec, Codec(key, self._prefix))

    # --- reading ----------------------------------------------------------------------------------

    async def snapshot(self, hosts: Collection[str] | None = None) -> ClusterView:
        reply, stored = await self._records.all(partial(self._snapshot, hosts), itemgetter(2))
        values, others, _, drains, rehearsals, paused, breaker = reply
        opened = self._codec.demanded
        texts = ((name, self._codec.body(value, HostStatus)) for name, value in paired(values))
        statuses = self._statuses.read(texts, _lines(others))
        return ClusterView(
            hosts=statuses.hosts,
            unread=statuses.unread,
            jobs=stored.records,
            unread_jobs=stored.unread,
            drains=self._requests(drains, DrainRequest),
            rehearsals=self._requests(rehearsals, RehearsalRequest),
            paused=bool(paused),
            breaker=Breaker() if breaker is None else opened(breaker, Breaker, "breaker"),
        )

    async def _snapshot(self, hosts: Collection[str] | None, known: Known) -> Any:
        hosts = None if hosts is None else {*hosts, *self._statuses.unverified}
        reply = await self._snapshot_of(hosts, known)
        if hosts is not None and (new := self._statuses.new(_lines(reply[1]))):
            return await self._snapshot_of({*hosts, *new}, known)
        return reply

    async def _snapshot_of(self, hosts: Collection[str] | None, known: Known) -> Any:
        keys = ["hosts", "jobs", "drains", "rehearsals", "paused", "breaker"]
        wanted = ("",) if hosts is None else (len(hosts), *hosts)
        return await self._run(lua_records.SNAPSHOT, keys, *wanted, *marks(known))

    def _requests(self, reply: Sequence[bytes], kind: type[Request]) -> tuple[Request, ...]:
        found: dict[str, Request] = self._codec.named(paired(reply), kind, lambda r: r.host)
        return tuple(found[host] for host in sorted(found))

    async def jobs(self) -> StoredJobs:
        async def ask(known: Known) -> Any:
            return await self._run(lua_records.JOBS, ["jobs"], *marks(known))

        return (await self._records.all(ask, lambda reply: reply))[1]

    async def jobs_named(self, names: Collection[str]) -> StoredJobs:
        async def ask(known: Known) -> Any:
            return (
                await self._run(lua_records.JOBS_NAMED, [], *demands(names, known)) if names else ()
            )

        return await self._records.named(names, ask)

    @property
    def forged_kinds(self) -> list[str]:
        """The kinds of value that were read and do not match the secret of this host."""
        return self._codec.forged_kinds

    async def clock(self) -> float:
        seconds, microseconds = await self._ask(self._redis.time())
        return float(seconds) + float(microseconds) / 1e6

    async def host_boot(self, host: str) -> str | None:
        value = await self._run(lua.VALUE, [f"host:{host}"])
        if value is None:
            return None
        body = self._codec.body(value, HostStatus)
        return "" if body is None else boot_of(host, body)

    async def leader(self) -> str:
        return text(await self._run(lua.LEADER, ["leader"]))

    async def alerts(self, after: str, *, limit: int) -> list[tuple[str, Alert]]:
        while True:
            first = f"({after}" if after else "-"
            entries = await self._run(lua.ALERTS, ["alerts"], first, limit)
            # The text has a field of its own, for subscribers that do not know the secret.
            read = [(text(c), self._codec.readable(s + b" " + b, Alert)) for c, b, s in entries]
            found = [(cursor, alert) for cursor, alert in read if alert is not None]
            if found or len(entries) < limit:
                return found
            after = read[-1][0]  # a page of forged alerts must not hide later pages

    async def newest_alert(self) -> str:
        entries = await self._ask(self._redis.xrevrange(self._key("alerts"), count=1))
        return text(entries[0][0]) if entries else ""

    async def announced(self) -> Announced | None:
        value = await self._run(lua.VALUE, ["told-outside"])
        return None if value is None else self._codec.opened(value, Announced)

    async def probe(self) -> None:
        """Write a key that expires by itself: Redis may serve reads while it refuses writes.

        Raises:
            StoreUnavailable: Redis refuses the write.
        """
        await self._ask(self._redis.set(self._key("probe"), b"1", px=PROBE_MS))

    # --- writing ----------------------------------------------------------------------------------

    async def claim_host(self, status: HostStatus, *, ttl_s: float) -> bool:
        key, value = self._key(f"host:{status.host}"), self._codec.sealed(status)
        return bool(await self._ask(self._redis.set(key, value, px=_ms(ttl_s), nx=True)))

    async def put_host(self, status: HostStatus, *, ttl_s: float, wake: bool) -> None:
        # Two plain commands cost the server a third of what a script costs.
        commands = self._redis.pipeline(transaction=False)
        commands.set(self._key(f"host:{status.host}"), self._codec.sealed(status), px=_ms(ttl_s))
        commands.sadd(self._key("hosts"), status.host)
        if wake:
            commands.eval(lua.lean(lua.WAKE_LEADER), 0, self._prefix, f"host {status.host}")
        await self._ask(commands.execute())

    async def acquire(self, holder: str, *, ttl_s: float, floor: int) -> Answer:
        granted, word, remaining = await self._run_replicated(
            lua.ACQUIRE, ["leader", "epoch"], holder, _ms(ttl_s), floor
        )
        if granted:
            return Granted(epoch=int(word))
        return Denied(holder=text(word), remaining_s=max(0, remaining) / 1000)

    async def release(self, holder: str) -> None:
        await self._run(lua.RELEASE, ["leader"], holder)

    async def put_job(
        self, record: JobRecord, *, expected: int, listeners: Collection[str] = ()
    ) -> None:
        new = ReadRecord.of(record, self._codec.sealed(record))
        outcome, stored = await self._run_replicated(
            lua_records.PUT_JOB,
            [f"job:{record.job}", "jobs"],
            record.job,
            record.lease_epoch,
            expected,
            record.revision,
            new.record,
            new.seal,
            *self._records.change_to(record.job, new, expected),
        )
        if outcome == b"forged":
            raise self._codec.forged_error(JobRecord, f"job:{record.job}")
        if outcome == b"stale":
            raise StaleLease(
                f"{record.job}: written under the newer lease epoch {int(stored)}", int(stored)
            )
        if outcome == b"conflict":
            raise Conflict(f"{record.job}: revision is {int(stored)}, expected {expected}")
        self._records.wrote(record.job, new)
        # Only now: nobody should act on a plan that a fail-over would lose. The record is stored,
        # and a lost wake-up only delays.
        with suppress(StoreUnavailable):
            await self._run(lua.WAKE_HOSTS, [], f"{Topic.JOBS} {record.job}", *listeners)

    @property
    def unreplicated(self) -> str:
        return self._replication.problem

    async def look_for_replica(self) -> None:
        await self._ask(self._replication.probe(self._key("probe")))

    def forget_replica(self) -> None:
        self._replication.reset()

    async def restore_job(self, record: JobRecord) -> bool:
        known = ReadRecord.of(record, self._codec.sealed(record))
        keys = [f"job:{record.job}", "jobs"]
        args = (record.job, record.lease_epoch, record.revision, known.record, known.seal)
        restored = await self._run(lua_records.RESTORE_JOB, keys, *args)
        if restored < 0:
            raise self._codec.forged_error(JobRecord, f"job:{record.job}")
        return bool(restored)

    async def unlist_job(self, record: JobRecord) -> bool:
        keys = [f"job:{record.job}", "jobs"]
        args = (record.job, record.revision, _ms(UNLISTED_S))
        return bool(await self._run(lua_records.UNLIST_JOB, keys, *args))

    async def publish_alert(self, alert: Alert) -> None:
        channel = f"tmd:{self._cluster}:alerts"
        seal, _, body = self._codec.sealed(alert).partition(b" ")
        args = (channel, mark(alert), body, self._alerts_kept, seal)
        await self._run(lua.PUBLISH_ALERT, ["alerts", "told"], *args)

    async def holds_alert(self, alert: Alert) -> bool:
        args = (mark(alert), self._alerts_kept, alert.at)
        return bool(await self._run(lua.HOLDS_ALERT, ["told"], *args))

    async def put_announced(self, announced: Announced) -> None:
        await self._ask(self._redis.set(self._key("told-outside"), self._codec.sealed(announced)))

    async def drain(self, request: DrainRequest) -> None:
        while True:
            _, standing = await self._stored_drain(request.host)
            if why := request.refusal(standing):
                raise DrainRefused(why)
            if await self.swap_drain(request.host, standing.id if standing else "", request):
                return

    async def undrain(self, host: str) -> bool:
        removed = await self._ask(self._redis.hdel(self._key("drains"), host))
        await self._wake_leader()
        return bool(removed)

    async def swap_drain(self, host: str, seen: str, request: DrainRequest | None) -> bool:
        stored, standing = await self._stored_drain(host)
        if (standing.id if standing else "") != seen:
            return False
        args = (host, stored, b"" if request is None else self._codec.sealed(request))
        return bool(await self._run(lua.SWAP_FIELD, ["drains"], *args))

    async def _stored_drain(self, host: str) -> tuple[bytes, DrainRequest | None]:
        """The drain of ``host`` as stored, and as read; ``None`` if no member has made one."""
        stored = await self._ask(self._redis.hget(self._key("drains"), host)) or b""
        found = self._codec.opened(stored, DrainRequest) if stored else None
        return stored, found if found is not None and found.host == host else None

    async def rehearse(self, request: RehearsalRequest) -> None:
        await self._put("rehearsals", request.host, request)
        await self._wake_leader()

    async def declare_healthy(self, request: HealthyRequest) -> None:
        await self._put("healthy", request.id, request)
        await self._wake(f"{Topic.HEALTHY} {request.host}")

    async def healthy_requests(self) -> tuple[HealthyRequest, ...]:
        reply = await self._run(lua.FIELDS, ["healthy"])
        found: dict[str, HealthyRequest] = self._codec.named(
            paired(reply), HealthyRequest, lambda r: r.id
        )
        return tuple(sorted(found.values(), key=lambda r: (r.at, r.id)))

    async def healthy_served(self, request: HealthyRequest) -> None:
        await self._ask(self._redis.hdel(self._key("healthy"), request.id))

    async def set_paused(self, paused: bool) -> None:
        key = self._key("paused")
        await self._ask(self._redis.set(key, b"1") if paused else self._redis.delete(key))
        await self._wake_leader()

    async def set_breaker(self, breaker: Breaker) -> None:
        await self._ask(self._redis.set(self._key("breaker"), self._codec.sealed(breaker)))
        await self._wake_leader()

    # --- wake-ups ---------------------------------------------------------------------------------

    async def wakes(self, holder: str = "") -> AsyncIterator[Wake]:
        channels = [self._key("wake"), self._key(f"wake:{holder or 'observers'}")]
        try:
            async for wake in listen(self._redis, channels, self._place):
                yield wake
        except (RedisError, OSError) as error:
            raise StoreUnavailable(redis_errors.explained(error, self._place)) from error

    async def close(self) -> None:
        await disconnect(self._redis)

    async def _wake(self, what: str) -> None:
        await self._ask(self._redis.publish(self._key("wake"), what))

    async def _wake_leader(self) -> None:
        await self._run(lua.WAKE_LEADER, [], "leader")

    def _key(self, name: str) -> str:
        return self._prefix + name

    async def _run(self, script: str, keys: Sequence[str], *args: Any) -> Any:
        names = [self._key(key) for key in keys]
        return await self._ask(self._scripts.run(script, names, self._prefix, *args))

    async def _run_replicated(self, script: str, keys: Sequence[str], *args: Any) -> Any:
        names = [self._key(key) for key in keys]
        return await self._ask(self._replication.evaluate(script, names, self._prefix, *args))

    async def _put(self, table: str, name: str, request: Any) -> None:
        await self._ask(self._redis.hset(self._key(table), name, self._codec.sealed(request)))

    async def _ask(self, reply: Any) -> Any:
        """The reply of Redis. Every error of Redis or the network becomes the one that callers
        handle, with its cause and remedy."""
        try:
            found = await reply
        except (RedisError, OSError) as error:
            cause = await self._cause(error)
            check_cancellation()
            raise StoreUnavailable(cause) from error
        check_cancellation()
        return found

    async def _cause(self, error: Exception) -> str:
        if not redis_errors.is_wrong_type(error):
            return redis_errors.explained(error, self._place)
        try:
            found = await misplaced_keys(self._redis, self._prefix)
            return redis_errors.misplaced(found, self._place)
        except (RedisError, OSError) as failure:
            return redis_errors.explained(failure, self._place)


def open_store(settings: Settings, timeout_s: float | None = None) -> RedisStore:
    """A connection to the configured cluster.

    Raises:
        ConfigError: no usable Redis or no secret is configured.
    """
    return RedisStore(
        settings.redis_url(),
        settings.cluster.name,
        settings.store_key(),
        timeout_s=timeout_s or settings.redis.timeout_s,
    )


def _lines(names: bytes) -> list[str]:
    return text(names).split("\n") if names else []


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
