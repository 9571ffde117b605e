"""Values that a foreign client may write into Redis: any type, length and encoding, any key."""

from __future__ import annotations

import random

STRINGS = (
    b"",
    b"evil",
    b"evil#1",
    b"a|b",
    b"|",
    b"|1",
    b"evil|5",
    b"evil|" + b"9" * 400,
    b"9" * 15,
    b"899999999999999",
    b"899999999999999",
    b"9" * 400,
    b"-1",
    b"1e308",
    b"inf",
    b"nan",
    b"0x10",
    b"\x00\xff\xfe|7",
    b"\xc3\x28",
    b"0" * 64 + b" {}",
    b"0" * 64 + b" " + b"[" * 10_000,
    "\u202e\x1b]0;title\x07[/]|3".encode(),
    b"x" * (17 << 20),
)
NAMES = (b"h1", b"job", b"", b"\xff\x00", b"n" * 2000, "\u202e".encode())
KEYS = (
    *("leader", "epoch", "hosts", "jobs", "drains", "rehearsals", "healthy", "paused"),
    *("breaker", "alerts", "told", "told-outside", "host:h1", "host:evil", "job:job", "job:evil"),
)
TYPES = ("string", "list", "set", "zset", "hash", "stream", "text field", "count field")


async def strike(stranger, prefix, key, kind, chance: random.Random):
    """Replace or extend the value at ``key`` with one of type ``kind``."""
    place, text, name = prefix + key, chance.choice(STRINGS), chance.choice(NAMES)
    if kind == "text field":  # if the key holds a hash, one of its fields
        kind, name = "hash", chance.choice((b"record", b"change:3", name))
    elif kind == "count field":
        kind, name = "hash", chance.choice((b"revision", b"fence"))
    # At once: a daemon may write a value of another type in between.
    at_once = stranger.pipeline(transaction=True)
    if (await stranger.type(place)).decode() != kind:
        at_once.delete(place)
    if kind == "string":
        at_once.set(place, text, px=chance.choice((None, 50, 10**12)))
    elif kind == "list":
        at_once.rpush(place, text, name)
    elif kind == "set":
        at_once.sadd(place, text, *NAMES)
    elif kind == "zset":
        at_once.zadd(place, {text: chance.choice((0.0, 1e308, float("-inf")))})
    elif kind == "hash":
        at_once.hset(place, name, text)
    else:
        at_once.xadd(place, {chance.choice((b"alert", b"seal", name)): text})
    await at_once.execute()
    if key.startswith(("host:", "job:")):
        table = prefix + key.partition(":")[0] + "s"
        if await stranger.type(table) in (b"set", b"none"):
            await stranger.sadd(table, key.partition(":")[2])


async def heal(stranger, prefix):
    """Delete all keys of the cluster."""
    keys = [key async for key in stranger.scan_iter(match=f"{prefix}*", count=1000)]
    if keys:
        await stranger.delete(*keys)
