"""A Redis client as configured: for one server, or for one found through Sentinels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

from tmd.core.values.errors import ConfigError

MISREAD = (
    "[redis] url: the host, port, database or an option cannot be parsed; write "
    "redis://user:password@host:6379/0, and in the password %2F for '/', %40 for '@', %3A for ':'"
)
"""Shows no part of the URL: the password may be in the part that cannot be parsed."""
UNKNOWN_OPTION = (
    "[redis] url: an option after '?' is unknown, or needs rediss:// or rediss+sentinel://; use "
    "those of redis-py, such as ssl_ca_certs, and write %3F for a '?' in the password"
)
DATABASE = (
    "[redis] url: the database after the host is a number from 0 on, as in /0; write a '/' in a "
    "password as %2F"
)

SENTINEL = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
"""Schemes of a server that Sentinels name, and of the server itself."""
SENTINEL_LOGIN = {"sentinel_username": "username", "sentinel_password": "password"}
"""Options at the end of a URL: the login of the Sentinels, which may be another one."""


def connect(url: str, timeout_s: float) -> Redis:
    """A client for ``url`` that answers or fails within ``timeout_s``.

    Raises:
        ConfigError: the URL cannot be parsed.
    """
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(MISREAD) from None
    if parts.scheme in SENTINEL:
        return _checked(lambda: _sentinel(url, options))
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(
            "[redis] url: the scheme is unknown; "
            "use redis://, rediss://, unix://, redis+sentinel:// or rediss+sentinel://"
        )
    database = unquote(parts.path).strip("/")
    if parts.scheme != "unix" and database and not database.isdecimal():
        raise ConfigError(DATABASE)  # redis-py would take 0
    return _checked(lambda: Redis.from_url(url, **options))


def _checked(build: Callable[[], Redis]) -> Redis:
    """The client, whose options are known: redis-py would refuse one only when it connects.

    Raises:
        ConfigError: the URL cannot be parsed, or has an unknown option or a negative database.
    """
    try:
        client = build()
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)
    except ValueError:
        raise ConfigError(MISREAD) from None
    except TypeError:
        raise ConfigError(UNKNOWN_OPTION) from None
    if pool.connection_kwargs.get("db", 0) < 0:
        raise ConfigError(DATABASE)
    return client


async def disconnect(client: Redis) -> None:
    """Close all connections of ``client``, also those to the Sentinels."""
    await client.aclose()
    pool = client.connection_pool
    if isinstance(pool, SentinelConnectionPool):
        for each in pool.sentinel_manager.sentinels:
            await each.aclose()


def _sentinel(url: str, options: dict[str, Any]) -> Redis:
    """``redis+sentinel://[user:password@]host:port,host:port/service[/db][?option=value]``.

    With ``rediss`` both the Sentinels and the server are asked with TLS; the options are those of a
    URL of one server, and :data:`SENTINEL_LOGIN`.
    """
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
        query, own = _without_login(parts.query)
        options = options | _of_query(SENTINEL[parts.scheme], query)
    except ValueError:
        raise ConfigError(MISREAD) from None
    sentinel = Sentinel(places, sentinel_kwargs=options | own, **options)  # type: ignore[no-untyped-call]
    client: Redis = sentinel.master_for(
        service, db=number, username=unquote(user) or None, password=unquote(password) or None
    )
    return client


def _without_login(query: str) -> tuple[str, dict[str, str]]:
    """The other options of a URL, and the login of the Sentinels."""
    pairs = [part.partition("=") for part in query.split("&")]
    rest = "&".join("".join(pair) for pair in pairs if pair[0] not in SENTINEL_LOGIN)
    return rest, {SENTINEL_LOGIN[n]: unquote(v) for n, _, v in pairs if n in SENTINEL_LOGIN}


def _of_query(scheme: str, query: str) -> dict[str, Any]:
    """The options that the end of a URL sets, and whether TLS is used."""
    found: dict[str, Any] = dict(parse_url(f"{scheme}://host?{query}"))
    for name in ("host", "connection_class"):
        found.pop(name, None)
    return {**found, "ssl": True} if scheme == "rediss" else found
