"""Explains a failed request to Redis: its meaning and what the operator can do.

Pure: an exception in, a sentence out. Server versions put the error code at different places of
the text, so it is searched for anywhere.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from urllib.parse import urlsplit

from msgspec import Struct

from tmd.core.values.reasons import in_words


class RedisFailure(Struct, frozen=True):
    """A kind of failure: the pattern of its text, its meaning, and the remedy."""

    pattern: str
    meaning: str
    remedy: str


WRONG_TYPE = "WRONGTYPE"
"""The error code for a key that holds a value of another type than the request needs."""

REPLIES = (
    RedisFailure(
        r"\bOOM\b|OutOfMemoryError",
        "Redis is out of memory and refuses writes",
        "raise its maxmemory or delete other programs' keys; set maxmemory-policy noeviction",
    ),
    RedisFailure(
        r"\bREADONLY\b|ReadOnlyError|read.only replica",
        "this Redis is a read-only replica",
        "point [redis] url at the master, or use redis+sentinel:// to have it found",
    ),
    RedisFailure(
        r"\bMISCONF\b",
        "Redis cannot save its data and refuses writes",
        "see the log of Redis; usually its disk is full",
    ),
    RedisFailure(
        r"\bNOAUTH\b|\bWRONGPASS\b|AuthenticationError|[Aa]uthentication required|unauthenticated"
        r"|invalid (username-)?password|AUTH <password> called without any password",
        "Redis does not accept the user or password",
        "correct the login in [redis] url; that of Sentinels is its option sentinel_password",
    ),
    RedisFailure(
        r"\bNOPERM\b|NoPermissionError|no permissions",
        "the user of [redis] url is not permitted to do this",
        "give it the rights listed in the redis.acl that tmd ships",
    ),
    RedisFailure(
        r"\bLOADING\b|BusyLoadingError",
        "Redis is still loading its data",
        "wait, or check the log of Redis",
    ),
    RedisFailure(r"\bBUSY\b", "Redis is busy with a script", "see 'redis-cli SCRIPT KILL'"),
    RedisFailure(
        r"\bMASTERDOWN\b|\bNOREPLICAS\b|\bCLUSTERDOWN\b|Master(Down|NotFound)Error|ClusterDownError",
        "Redis has no working master at the moment",
        "check its replication state; the service name in [redis] url must be the Sentinel's",
    ),
    RedisFailure(
        r"max number of clients",
        "Redis has reached its limit of clients",
        "raise its maxclients",
    ),
    RedisFailure(
        r"Protocol Error|InvalidResponse",
        "the server that answers is not Redis",
        "correct host and port in [redis] url",
    ),
)

FILES = (
    "for unix:// it is the socket: start Redis, or join its group; for rediss:// a file that "
    "[redis] url names"
)
CONNECTIONS: tuple[tuple[type[BaseException], str, str], ...] = (
    (
        ssl.SSLCertVerificationError,
        "the certificate of Redis is not trusted",
        "name its certificate authority in [redis] url: rediss://...?ssl_ca_certs=/path/ca.crt",
    ),
    (
        ssl.SSLError,
        "the TLS handshake with Redis fails",
        "use redis:// in [redis] url if that port does not use TLS",
    ),
    (socket.gaierror, "the host name of Redis is not known", "correct [redis] url or the DNS"),
    (
        ConnectionRefusedError,
        "the connection is refused",
        "start Redis, or correct [redis] url",
    ),
    (FileNotFoundError, "a required file does not exist", FILES),
    (PermissionError, "this user may not open a required file", FILES),
    (
        TimeoutError,
        "Redis does not answer in time",
        "check whether it hangs, the network drops packets, or the port does not use TLS; "
        "[redis] timeout_s is the limit",
    ),
)
"""Checked in this order: an SSLCertVerificationError is also an SSLError."""


def explained(error: BaseException, place: str) -> str:
    """The sentence for ``error``: where, what happened, what to do. ``place``: see :func:`shown`.

    Errors in ``__cause__`` and ``__context__`` count: clients wrap the system's errors.
    """
    chain = list(_chain(error))
    # The client turns some error codes into exception classes and removes them from the text.
    text = " ".join(f"{type(e).__name__} {e}" for e in chain)
    for cause in REPLIES:
        if re.search(cause.pattern, text):
            return f"{place}: {cause.meaning}; {cause.remedy}"
    for kind, meaning, remedy in CONNECTIONS:
        if any(isinstance(e, kind) for e in chain):
            return f"{place}: {meaning}; {remedy}"
    if "imeout" in text:
        _, meaning, remedy = CONNECTIONS[-1]
        return f"{place}: {meaning}; {remedy}"
    return f"{place}: {_brief(error)}; is Redis running, and is [redis] url right?"


def is_wrong_type(error: BaseException) -> bool:
    """Whether ``error`` is about a key that holds a value of another type."""
    return WRONG_TYPE in str(error)


def misplaced(places: dict[str, str], place: str) -> str:
    """The sentence about keys of a wrong type; ``places``: key -> type found."""
    if not places:
        return f"{place}: a key holds a value of a type that tmd never writes there; delete it"
    found = ", ".join(f"{key!r} holds a {kind}" for key, kind in sorted(places.items()))
    return f"{place}: {found}, which tmd never writes there; delete it with 'redis-cli DEL <key>'"


def shown(url: str) -> str:
    """``url`` without user, password and query, for messages."""
    parts = urlsplit(url)
    # A password may hold a '/', or even a '?'.
    place = f"{parts.netloc}{parts.path}".rpartition("@")[2]
    return f"redis at {place}" if place and "@" not in parts.query + parts.fragment else "redis"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _brief(error: BaseException) -> str:
    return in_words(error).rstrip(".")[:200]
