"""What a failed request to Redis means and what the operator does about it.

Pure: an exception in, a sentence out. Servers of different versions put the same error code at
different places of their text, so it is looked for anywhere in it.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from urllib.parse import urlsplit

from msgspec import Struct

from tmd.core.values.reasons import in_words


class Cause(Struct, frozen=True):
    """A kind of failure: how its text is recognised, what it means, what to do."""

    pattern: str
    meaning: str
    remedy: str


WRONG_TYPE = "WRONGTYPE"
"""The code of an error about a key that holds another type of value than the request is for."""

REPLIES = (
    Cause(
        r"\bOOM\b|OutOfMemoryError",
        "Redis is out of memory and refuses writes",
        "raise its maxmemory or delete what is not tmd's, and set maxmemory-policy noeviction",
    ),
    Cause(
        r"\bREADONLY\b|ReadOnlyError|read.only replica",
        "this Redis is a read-only replica",
        "point [redis] url at the master, or use redis+sentinel:// to have it found",
    ),
    Cause(
        r"\bMISCONF\b",
        "Redis cannot save its data and refuses writes",
        "see the log of Redis; most often its disk is full",
    ),
    Cause(
        r"\bNOAUTH\b|\bWRONGPASS\b|AuthenticationError|[Aa]uthentication required"
        r"|invalid (username-)?password|AUTH <password> called without any password",
        "Redis does not accept the user or password",
        "mend the login in [redis] url",
    ),
    Cause(
        r"\bNOPERM\b|NoPermissionError|no permissions",
        "the user of [redis] url is not permitted to do this",
        "give it the rights listed in the redis.acl that tmd ships",
    ),
    Cause(
        r"\bLOADING\b|BusyLoadingError",
        "Redis is still loading its data",
        "wait, or see the log of Redis",
    ),
    Cause(r"\bBUSY\b", "Redis is busy with a script", "see 'redis-cli SCRIPT KILL'"),
    Cause(
        r"\bMASTERDOWN\b|\bNOREPLICAS\b|\bCLUSTERDOWN\b|Master(Down|NotFound)Error|ClusterDownError",
        "Redis has no working master at present",
        "see its replication state; the service name in [redis] url must be the Sentinel's",
    ),
    Cause(
        r"max number of clients",
        "Redis has as many clients as it admits",
        "raise its maxclients",
    ),
    Cause(
        r"Protocol Error|InvalidResponse",
        "what answers there is not Redis",
        "mend host and port in [redis] url",
    ),
)

FILES = (
    "of unix:// it is the socket: start Redis, or join its group; of rediss:// one of those that "
    "[redis] url names"
)
CONNECTIONS: tuple[tuple[type[BaseException], str, str], ...] = (
    (
        ssl.SSLCertVerificationError,
        "the certificate of Redis is not trusted",
        "name the authority in [redis] url: rediss://...?ssl_ca_certs=/path/ca.crt",
    ),
    (
        ssl.SSLError,
        "no TLS connection to Redis comes about",
        "use redis:// in [redis] url if that port does not speak TLS",
    ),
    (socket.gaierror, "the name of the Redis host is not known", "mend [redis] url or the DNS"),
    (
        ConnectionRefusedError,
        "nothing listens there",
        "start Redis, or mend [redis] url",
    ),
    (FileNotFoundError, "a file that is needed does not exist", FILES),
    (PermissionError, "a file that is needed may not be opened by this user", FILES),
    (
        TimeoutError,
        "Redis does not answer in time",
        "see whether it hangs, the network drops packets, or rediss:// meets a port without TLS; "
        "[redis] timeout_s is the limit",
    ),
)
"""In this order: an SSLCertVerificationError is an SSLError, too."""


def explained(error: BaseException, place: str) -> str:
    """The sentence for ``error``: where, what happened, what to do. ``place``: see :func:`shown`.

    Errors in ``__cause__`` and ``__context__`` count: clients wrap what the system said.
    """
    chain = list(_chain(error))
    # The client turns some codes into a class of their own and takes them out of the text.
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
    """Whether ``error`` is about a key that holds another type of value."""
    return WRONG_TYPE in str(error)


def misplaced(places: dict[str, str], place: str) -> str:
    """The sentence about keys whose type is wrong; ``places``: key -> type that was found."""
    if not places:
        return f"{place}: a key holds a value of a type that tmd never writes there; delete it"
    found = ", ".join(f"{key!r} holds a {kind}" for key, kind in sorted(places.items()))
    return f"{place}: {found}, which tmd never writes there; delete it with 'redis-cli DEL <key>'"


def shown(url: str) -> str:
    """``url`` as messages show it: without user, password and query."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"redis at {host}{parts.path if host else parts.path or url}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _brief(error: BaseException) -> str:
    return in_words(error).rstrip(".")[:200]
