"""The store in Redis: the only file that knows Redis.

Every change is one Lua script (:mod:`tmd.daemon.lua`); values are JSON behind a seal
(:mod:`tmd.daemon.codec`): people can read them with ``redis-cli``, and strangers cannot write them.
A forged request, host status or alert is as if it were not there; a forged record or breaker stops
deciding, since doing less is all that is left. The client never retries by itself: a blocked
renewal would outlive the lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from tmd.config import Settings
from tmd.core.alerts import mark
from tmd.core.election import Answer, Denied, Granted
from tmd.core.errors import (
    ConfigError,
    Conflict,
    StaleLease,
    StoreUnavailable,
)
from tmd.core.fuse import Breaker
from tmd.core.model import Alert, ClusterView, HostStatus, JobRecord
from tmd.core.notices import Told
from tmd.core.requests import DrainRequest, HealthyRequest, RehearsalRequest
from tmd.daemon import lua
from tmd.daemon.bus import Topic
from tmd.daemon.codec import Codec
from tmd.daemon.statuses import read_hosts

ALERTS_KEPT = 100_000
LISTEN_S = 2.0
"""The subscription is probed after so long without a message."""

T = TypeVar("T")


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
    ) -> None:
        self._redis = connect(url, timeout_s)
        self._cluster = cluster
        self._alerts_kept = alerts_kept
        self._prefix = f"{{tmd:{cluster}}}:"
        self._codec = Codec(key, self._prefix)
        self._hosts: dict[bytes, HostStatus] = {}

    # --- reading ----------------------------------------------------------------------------------

    async def snapshot(self) -> ClusterView:
        hosts, jobs, drains, rehearsals, paused, breaker = await self._run(
            lua.SNAPSHOT, ["hosts", "jobs", "drains", "rehearsals", "paused", "breaker"]
        )
        asked = self._codec.all_opened(rehearsals, RehearsalRequest)
        bodies = [b for v in hosts if (b := self._codec.body(v, HostStatus)) is not None]
        self._hosts, unread = read_hosts(bodies, self._hosts)
        return ClusterView(
            hosts=tuple(sorted(self._hosts.values(), key=lambda h: h.host)),
            unread=unread,
            # One left out would look like a job that is to be formed anew.
            jobs=tuple(sorted(self._codec.all_demanded(jobs, JobRecord), key=lambda j: j.job)),
            drains=tuple(
                sorted(self._codec.all_opened(drains, DrainRequest), key=lambda d: d.host)
            ),
            rehearsals=tuple(sorted(asked, key=lambda r: r.host)),
            paused=bool(paused),
            breaker=self._codec.demanded(breaker, Breaker) if breaker else Breaker(),
        )

    async def jobs(self) -> tuple[JobRecord, ...]:
        records = await self._run(lua.JOBS, ["jobs"])
        return tuple(self._codec.all_demanded(records, JobRecord))

    async def clock(self) -> float:
        """Wall-clock seconds of the server, to show to people."""
        with _errors():
            seconds, microseconds = await self._redis.time()
        return float(seconds) + float(microseconds) / 1e6

    async def leader(self) -> str:
        with _errors():
            held: Any = await self._redis.get(self._key("leader"))
        return held.decode().rpartition("|")[0] if held else ""

    async def alerts(self, after: str, *, limit: int) -> list[tuple[str, Alert]]:
        first = f"({after}" if after else "-"
        with _errors():
            entries: Any = await self._redis.xrange(self._key("alerts"), min=first, count=limit)
        found = [(cursor.decode(), self._alert(entry)) for cursor, entry in entries]
        return [(cursor, alert) for cursor, alert in found if alert is not None]

    def _alert(self, entry: dict[bytes, bytes]) -> Alert | None:
        """The text stands in a field of its own, for subscribers that do not know the secret."""
        return self._codec.opened(entry.get(b"seal", b"") + b" " + entry.get(b"alert", b""), Alert)

    async def newest_alert(self) -> str:
        with _errors():
            entries: Any = await self._redis.xrevrange(self._key("alerts"), count=1)
        return entries[0][0].decode() if entries else ""

    async def told(self) -> Told | None:
        with _errors():
            value: Any = await self._redis.get(self._key("told-outside"))
        return self._codec.opened(value, Told) if value else None

    # --- writing ----------------------------------------------------------------------------------

    async def put_host(self, status: HostStatus, *, ttl_s: float, wake: bool) -> None:
        keys = [f"host:{status.host}", "hosts"]
        value = self._codec.sealed(status)
        await self._run(lua.PUT_HOST, keys, status.host, value, _ms(ttl_s), int(wake))

    async def acquire(self, holder: str, *, ttl_s: float, floor: int) -> Answer:
        granted, word, remaining = await self._run(
            lua.ACQUIRE, ["leader", "epoch"], holder, _ms(ttl_s), floor
        )
        if granted:
            return Granted(epoch=int(word))
        return Denied(holder=word.decode(), remaining_s=max(0, remaining) / 1000)

    async def release(self, holder: str) -> None:
        await self._run(lua.RELEASE, ["leader"], holder)

    async def put_job(self, record: JobRecord, *, expected: int) -> None:
        outcome, stored = await self._run(
            lua.PUT_JOB,
            [f"job:{record.job}", "jobs"],
            record.job,
            record.lease_epoch,
            expected,
            record.revision,
            self._codec.sealed(record),
        )
        if outcome == b"stale":
            raise StaleLease(f"{record.job}: written under lease epoch {stored.decode()} meanwhile")
        if outcome == b"conflict":
            raise Conflict(f"{record.job}: revision {stored.decode()}, expected {expected}")

    async def restore_job(self, record: JobRecord) -> bool:
        restored = await self._run(
            lua.RESTORE_JOB,
            [f"job:{record.job}", "jobs"],
            record.job,
            record.lease_epoch,
            record.revision,
            self._codec.sealed(record),
        )
        return bool(restored)

    async def publish_alert(self, alert: Alert) -> None:
        channel = f"tmd:{self._cluster}:alerts"
        seal, _, body = self._codec.sealed(alert).partition(b" ")
        await self._run(
            lua.PUBLISH_ALERT,
            ["alerts", "told"],
            channel,
            mark(alert),
            body,
            self._alerts_kept,
            seal,
        )

    async def holds_alert(self, alert: Alert) -> bool:
        longest = self._alerts_kept
        return bool(await self._run(lua.HOLDS_ALERT, ["told"], mark(alert), longest, alert.at))

    async def put_told(self, told: Told) -> None:
        with _errors():
            await self._redis.set(self._key("told-outside"), self._codec.sealed(told))

    async def drain(self, request: DrainRequest) -> None:
        with _errors():
            await self._redis.hset(self._key("drains"), request.host, self._codec.sealed(request))
        await self._wake()

    async def undrain(self, host: str) -> bool:
        with _errors():
            removed = await self._redis.hdel(self._key("drains"), host)
        await self._wake()
        return bool(removed)

    async def rehearse(self, request: RehearsalRequest) -> None:
        with _errors():
            await self._redis.hset(
                self._key("rehearsals"), request.host, self._codec.sealed(request)
            )
        await self._wake()

    async def declare_healthy(self, request: HealthyRequest) -> None:
        with _errors():
            await self._redis.hset(self._key("healthy"), request.id, self._codec.sealed(request))
        await self._wake()

    async def healthy_requests(self) -> tuple[HealthyRequest, ...]:
        with _errors():
            values: Any = await self._redis.hvals(self._key("healthy"))
        return tuple(
            sorted(self._codec.all_opened(values, HealthyRequest), key=lambda r: (r.at, r.id))
        )

    async def healthy_served(self, request: HealthyRequest) -> None:
        with _errors():
            await self._redis.hdel(self._key("healthy"), request.id)

    async def set_paused(self, paused: bool) -> None:
        with _errors():
            if paused:
                await self._redis.set(self._key("paused"), b"1")
            else:
                await self._redis.delete(self._key("paused"))
        await self._wake()

    async def set_breaker(self, breaker: Breaker) -> None:
        with _errors():
            await self._redis.set(self._key("breaker"), self._codec.sealed(breaker))
        await self._wake()

    # --- wake-ups ---------------------------------------------------------------------------------

    async def wakes(self) -> AsyncIterator[Topic]:
        with _errors():
            async with self._redis.pubsub(ignore_subscribe_messages=True) as pubsub:
                await pubsub.subscribe(self._key("wake"))
                yield Topic.ALL
                probed = False
                while True:
                    message = await pubsub.get_message(timeout=LISTEN_S)
                    if message is not None and message["type"] == "message":
                        yield _topic(message["data"])
                    elif message is None and probed:
                        raise StoreUnavailable("the subscription fell silent")
                    elif message is None:
                        await pubsub.ping()
                    _heed_cancellation()
                    probed = message is None

    async def close(self) -> None:
        await self._redis.aclose()

    async def _wake(self) -> None:
        with _errors():
            await self._redis.publish(self._key("wake"), Topic.ALL.value)

    def _key(self, name: str) -> str:
        return self._prefix + name

    async def _run(self, script: str, keys: Sequence[str], *args: Any) -> Any:
        # EVAL, not EVALSHA: one round trip even on a server that has just been restarted.
        names = [self._key(key) for key in keys]
        with _errors():
            return await self._redis.eval(script, len(names), *names, self._prefix, *args)


def open_store(settings: Settings, timeout_s: float | None = None) -> RedisStore:
    """A connection to the configured cluster.

    Raises:
        ConfigError: no usable Redis, or no secret, is configured.
    """
    return RedisStore(
        settings.redis_url(),
        settings.cluster.name,
        settings.store_key(),
        timeout_s=timeout_s or settings.redis.timeout_s,
    )


def connect(url: str, timeout_s: float) -> Redis:
    """A client for ``url`` that answers or fails within ``timeout_s``.

    Raises:
        ConfigError: the URL is not understood.
    """
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    parts = urlsplit(url)
    if parts.scheme == "redis+sentinel":
        return _sentinel(url, options)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(
            f"[redis] url: '{parts.scheme}://' is not understood; "
            "use redis://, rediss://, unix:// or redis+sentinel://"
        )
    try:
        return Redis.from_url(url, **options)
    except ValueError as error:
        raise ConfigError(f"[redis] url: {error}") from None


def _sentinel(url: str, options: dict[str, Any]) -> Redis:
    """``redis+sentinel://[user:password@]host:port,host:port/service[/db]``."""
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    service, _, db = parts.path.strip("/").partition("/")
    if not service or not hosts:
        raise ConfigError("[redis] url: write redis+sentinel://host:26379,host:26379/service/0")
    user, _, password = login.partition(":")
    try:
        pairs = [place.partition(":") for place in hosts.split(",")]
        places = [(host, int(port or 26379)) for host, _, port in pairs]
        number = int(db or 0)
    except ValueError as error:
        raise ConfigError(f"[redis] url: {error}") from None
    sentinel = Sentinel(places, sentinel_kwargs=options, **options)  # type: ignore[no-untyped-call]
    client: Redis = sentinel.master_for(
        service, db=number, username=user or None, password=password or None
    )
    return client


@contextmanager
def _errors() -> Iterator[None]:
    """Whatever Redis or the network raises becomes the one error that callers react to."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise StoreUnavailable(f"redis: {error or type(error).__name__}") from error
    _heed_cancellation()


def _heed_cancellation() -> None:
    """redis-py sends with ``asyncio.wait_for``, which until Python 3.12 loses a cancellation that
    comes together with the result: the task would never end."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _topic(data: Any) -> Topic:
    try:
        return Topic(bytes(data).decode())
    except ValueError:
        return Topic.ALL


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
