"""Finds keys of the cluster that hold a value of a type which tmd never writes there."""

from __future__ import annotations

from itertools import islice
from typing import Any

from redis.asyncio import Redis

from tmd.daemon.codec import text

MOST_LOOKED_AT = 200
"""How many hosts, and jobs, have the type of their key checked."""

KINDS = {
    **dict.fromkeys(["leader", "epoch", "breaker", "told-outside"], "string"),
    **dict.fromkeys(["hosts", "jobs"], "set"),
    **dict.fromkeys(["drains", "rehearsals", "healthy"], "hash"),
    "told": "zset",
    "alerts": "stream",
}
"""Expected types of keys whose wrong type makes a request fail: the error names the key."""


async def misplaced_keys(redis: Redis, prefix: str) -> dict[str, str]:
    """Keys that hold a value of a wrong type, and that type. ``prefix``: of all keys of the
    cluster."""
    wanted = dict(KINDS)
    for table, kind in (("hosts", "string"), ("jobs", "hash")):
        key = prefix + table
        if await redis.type(key) == b"set":
            members: Any = await redis.smembers(key)
            some = islice(members, MOST_LOOKED_AT)
            wanted |= {f"{table[:-1]}:{text(name)}": kind for name in some}
    found = {}
    for name, kind in wanted.items():
        held: Any = await redis.type(prefix + name)
        if text(held) not in (kind, "none"):
            found[prefix + name] = text(held)
    return found
