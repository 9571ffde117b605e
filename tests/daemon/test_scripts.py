"""Scripts are sent to a real Redis by their digest."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from tests.daemon.redises import member_url, plain, shipped_users
from tmd.daemon.redis_client import connect
from tmd.daemon.scripts import Scripts
from tmd.embedded import EmbeddedRedis

SCRIPT = """
-- A comment, which is not sent.
return {KEYS[1], ARGV[1], redis.call('INCR', KEYS[1])}
"""
KEY = "{tmd:c}:n"


@pytest.fixture
async def client(redis: EmbeddedRedis) -> AsyncIterator[Redis]:
    opened = connect(redis.url, 2.0)
    yield opened
    await opened.aclose()


async def calls(client: Redis) -> tuple[int, int]:
    """How often a text was run, and how often a digest was asked for."""
    stats = await client.info("commandstats")
    text, known = (stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))
    return text, known


async def test_the_text_of_a_script_is_sent_once(client: Redis) -> None:
    scripts = Scripts(client)
    replies = [await scripts.run(SCRIPT, [KEY], word) for word in (b"a", b"b", b"c")]

    assert replies == [[KEY.encode(), word, n] for n, word in enumerate((b"a", b"b", b"c"), 1)]
    assert await calls(client) == (1, 2)


async def test_a_server_that_has_forgotten_a_script_gets_its_text_again(client: Redis) -> None:
    """It has run nothing before: the count goes up by one."""
    scripts = Scripts(client)
    await scripts.run(SCRIPT, [KEY], b"a")
    await client.script_flush()
    reply = await scripts.run(SCRIPT, [KEY], b"b")

    assert reply[2] == 2
    assert await calls(client) == (2, 1)


@asynccontextmanager
async def denied(binary: str, folder: Path, command: str) -> AsyncIterator[tuple[Redis, Redis]]:
    """A member that may not run ``command`` on a server of its own, and one that may do all."""
    users = folder / "users.acl"
    allowed = shipped_users().replace(f"+{command} ", "")
    users.write_text(f"{allowed}\nuser admin on nopass ~* &* +@all\n")
    with plain(binary, folder, "--aclfile", str(users)) as (port, _):
        member = connect(member_url(port), 2.0)
        admin = connect(f"redis://admin:x@127.0.0.1:{port}/0", 2.0)
        try:
            yield member, admin
        finally:
            await member.aclose()
            await admin.aclose()


async def test_a_user_that_may_send_texts_only_is_served(redis_binary: str, tmp_path: Path) -> None:
    """As an earlier release has made it. It is refused once."""
    async with denied(redis_binary, tmp_path, "evalsha") as (member, admin):
        scripts = Scripts(member)
        replies = [await scripts.run("return ARGV[1]", [], b"a") for _ in range(4)]
        stats = await admin.info("commandstats")

    assert replies == [b"a"] * 4
    assert stats["cmdstat_eval"]["calls"] == 4
    assert stats["cmdstat_evalsha"]["rejected_calls"] == 1


async def test_a_script_that_is_denied_a_command_is_not_run_again(
    redis_binary: str, tmp_path: Path
) -> None:
    """It may have written something before that."""
    script = """
        redis.call('HSET', KEYS[1], ARGV[1], 1)
        if ARGV[1] == 'b' then redis.call('DEL', KEYS[1]) end
    """
    async with denied(redis_binary, tmp_path, "del") as (member, admin):
        scripts = Scripts(member)
        await scripts.run(script, [KEY], b"a")
        with pytest.raises(ResponseError):
            await scripts.run(script, [KEY], b"b")
        stats = await admin.info("commandstats")

    assert stats["cmdstat_eval"]["calls"] == 1
    assert stats["cmdstat_hset"]["calls"] == 2
