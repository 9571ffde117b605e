"""Records of jobs are sent by Redis once, and again whenever they have changed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest
from redis.asyncio import Redis

from tests import values
from tmd.core.values.model import JobRecord
from tmd.daemon.redis_client import connect
from tmd.daemon.store import RedisStore
from tmd.embedded import EmbeddedRedis

PREFIX = "{tmd:test}:"


class Scene(NamedTuple):
    """A member that reads, one that writes, and a client that does not know the secret."""

    reader: RedisStore
    writer: RedisStore
    stranger: Redis

    async def sent(self) -> int:
        """Bytes that Redis has sent to all clients."""
        return int((await self.stranger.info("stats"))["total_net_output_bytes"])

    async def bytes_to_read(self) -> int:
        """What it sends for one reading of the records."""
        idle = await self.sent()
        before = await self.sent()
        await self.reader.jobs()
        return await self.sent() - before - (before - idle)


@pytest.fixture
async def scene(redis: EmbeddedRedis) -> AsyncIterator[Scene]:
    reader, writer = (RedisStore(redis.url, "test", b"key") for _ in range(2))
    stranger = connect(redis.url, 5.0)
    async with contextlib.aclosing(stranger):
        yield Scene(reader, writer, stranger)
        await reader.close()
        await writer.close()


def large(revision: int, note: str = "", lease_epoch: int = 1) -> JobRecord:
    """A record of a job of 500 ranks."""
    hosts = [f"host-{n}" for n in range(500)]
    return values.record(*hosts, revision=revision, lease_epoch=lease_epoch, detail=note)


async def test_an_unchanged_record_is_not_sent_again(scene: Scene) -> None:
    """What a host reads each second does not depend on the number of ranks."""
    await scene.writer.put_job(large(1), expected=0)
    first, again = await scene.bytes_to_read(), await scene.bytes_to_read()
    await scene.writer.put_job(large(2), expected=1)
    changed = await scene.bytes_to_read()

    assert first > 20_000
    assert again < 500
    assert changed > 20_000
    assert (await scene.reader.jobs()).records == (large(2),)
    assert (await scene.reader.snapshot()).jobs == (large(2),)


async def test_another_record_with_the_same_numbers_is_read(scene: Scene) -> None:
    """A fail-over may lose a revision, which the leader then writes anew with other contents."""
    await scene.writer.put_job(large(1, "lost"), expected=0)
    assert (await scene.reader.jobs()).records == (large(1, "lost"),)
    await scene.stranger.delete(PREFIX + "job:job")
    await scene.writer.put_job(large(1, "kept"), expected=0)

    assert (await scene.reader.jobs()).records == (large(1, "kept"),)


async def test_a_record_that_is_gone_is_not_remembered(scene: Scene) -> None:
    await scene.writer.put_job(large(1), expected=0)
    assert (await scene.reader.jobs()).records == (large(1),)
    await scene.stranger.delete(PREFIX + "job:job")

    assert (await scene.reader.jobs()).records == ()
    assert await scene.writer.restore_job(large(1))
    assert (await scene.reader.jobs()).records == (large(1),)


@pytest.mark.parametrize("seal", [None, "", "0" * 64])
async def test_a_record_beside_which_another_seal_stands_is_always_read(
    scene: Scene, seal: str | None
) -> None:
    """Earlier versions leave the seal of the record before, or none; strangers write anything."""
    await scene.writer.put_job(large(1), expected=0)
    if seal is None:
        await scene.stranger.hdel(PREFIX + "job:job", "seal")
    else:
        await scene.stranger.hset(PREFIX + "job:job", "seal", seal)
    await scene.reader.jobs()

    assert await scene.bytes_to_read() > 20_000
    assert (await scene.reader.jobs()).records == (large(1),)
