"""Scripts are sent to a real Redis by their digest."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.daemon.redises import ACL, guarded, member_url
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


async def test_a_user_that_may_send_texts_only_is_served(
    redis_binary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an earlier release has made it."""
    earlier = tmp_path / "earlier.acl"
    earlier.write_text(ACL.read_text().replace("+evalsha", "+incr"))
    monkeypatch.setattr("tests.daemon.redises.ACL", earlier)
    with guarded(redis_binary, tmp_path) as port:
        member = connect(member_url(port), 2.0)
        try:
            scripts = Scripts(member)
            replies = [await scripts.run(SCRIPT, [KEY], b"a") for _ in range(3)]
        finally:
            await member.aclose()

    assert [reply[2] for reply in replies] == [1, 2, 3]
