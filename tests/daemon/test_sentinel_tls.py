"""A Redis that Sentinels name, where both speak TLS only."""

from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import RedisError

from tests.daemon.redises import encrypted, sentinel_of
from tmd.core.values.errors import ConfigError, StoreUnavailable
from tmd.daemon.redis_client import connect, disconnect
from tmd.daemon.store import RedisStore


@pytest.fixture(scope="module")
def trusted(redis_binary, tmp_path_factory):
    """The URL of a server behind a Sentinel, and the file of its authority."""
    folder = tmp_path_factory.mktemp("tls")
    with (
        encrypted(redis_binary, folder) as (port, authority),
        sentinel_of(redis_binary, folder, port, authority) as sentinel,
    ):
        yield f"rediss+sentinel://127.0.0.1:{sentinel}/tmd/0", authority


async def asked(url):
    client = connect(url, 5.0)
    try:
        async with asyncio.timeout(20):
            return await client.ping()
    finally:
        await disconnect(client)


async def test_sentinel_and_server_are_asked_with_tls(trusted):
    url, authority = trusted

    assert await asked(f"{url}?ssl_ca_certs={authority}")


async def test_the_store_works_behind_it(trusted):
    url, authority = trusted
    store = RedisStore(f"{url}?ssl_ca_certs={authority}", "c", b"key")
    try:
        await store.set_paused(True)
        paused = (await store.snapshot()).paused
    finally:
        await store.close()

    assert paused


async def test_neither_is_trusted_without_its_authority(trusted):
    with pytest.raises(RedisError):
        await asked(trusted[0])


async def test_the_store_names_the_cause(trusted):
    """An operator who forgot the authority learns it from the error."""
    store = RedisStore(trusted[0], "c", b"key")
    try:
        with pytest.raises(StoreUnavailable) as raised:
            await store.snapshot()
    finally:
        await store.close()

    assert str(raised.value)


@pytest.mark.parametrize(
    "url", ["rediss+sentinel://h:26379", "rediss+sentinel:///s", "rediss+sentinel://h:x/s"]
)
def test_an_address_without_service_or_port_is_refused(url):
    with pytest.raises(ConfigError, match=r"\[redis\] url"):
        connect(url, 1.0)
