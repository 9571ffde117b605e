"""The subscription through which a daemon hears of changes in Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from redis.asyncio import Redis

from tmd.core.values.errors import StoreUnavailable
from tmd.daemon.bus import Topic, Wake

LISTEN_S = 2.0
"""The subscription is probed after this long without a message."""


async def listen(redis: Redis, channels: Sequence[str], place: str) -> AsyncIterator[Wake]:
    """Wake-ups as they arrive, starting with one ``ALL``. ``place``: of this Redis, for errors.

    Raises:
        StoreUnavailable: the subscription is silent.
        RedisError, OSError: it broke.
    """
    async with redis.pubsub() as pubsub:
        await pubsub.subscribe(*channels)
        yield Wake(Topic.ALL)
        probed = False
        while True:
            message = await pubsub.get_message(timeout=LISTEN_S)
            if message is not None and message["type"] == "message":
                yield _read(message["data"])
            elif message is None and probed:
                raise StoreUnavailable(f"{place}: the subscription is silent")
            elif message is None:
                await pubsub.ping()
            check_cancellation()
            probed = message is None


def _read(data: Any) -> Wake:
    topic, _, about = bytes(data).decode(errors="replace").partition(" ")
    try:
        return Wake(Topic(topic), about)
    except ValueError:
        return Wake(Topic.ALL)


def check_cancellation() -> None:
    """redis-py sends with ``asyncio.wait_for``, which before Python 3.12 loses a cancellation that
    arrives together with the result or an error: the task would never end."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
