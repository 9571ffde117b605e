"""A Redis with the ACL that tmd ships, and one with TLS. The contract of stores runs with the ACL,
too, and shows that it allows all that a member needs."""

from __future__ import annotations

from contextlib import aclosing

import pytest
from redis.exceptions import NoPermissionError

from tests.daemon.redises import encrypted, guarded, member_url, subscriber_url
from tests.values import alert
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.model import HostStatus
from tmd.daemon.bus import Topic
from tmd.daemon.redis_client import connect
from tmd.daemon.store import RedisStore

DESTRUCTIVE = [
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("CONFIG", "GET", "*"),
    ("KEYS", "*"),
    ("SHUTDOWN",),
    ("ACL", "LIST"),
    ("SET", "of another application", "x"),
    ("GET", "of another application"),
    ("PUBLISH", "another channel", "x"),
]


@pytest.fixture
def port(redis_binary, tmp_path):
    with guarded(redis_binary, tmp_path) as port:
        yield port


@pytest.mark.parametrize("command", DESTRUCTIVE, ids=lambda c: " ".join(c))
async def test_a_member_may_not_access_keys_of_other_programs(port, command):
    client = connect(member_url(port), 2.0)
    try:
        with pytest.raises(NoPermissionError):
            await client.execute_command(*command)
    finally:
        await client.aclose()


async def test_a_subscriber_reads_alerts_and_nothing_else(port):
    store = RedisStore(member_url(port), "c", b"key")
    client = connect(subscriber_url(port), 2.0)
    try:
        await store.publish_alert(alert())
        entries = await client.xread({"{tmd:c}:alerts": "0"})
        async with client.pubsub(ignore_subscribe_messages=True) as pubsub:
            await pubsub.subscribe("tmd:c:alerts")
        for command in (
            ("XADD", "{tmd:c}:alerts", "*", "alert", "{}"),
            ("PUBLISH", "tmd:c:alerts", "{}"),
            ("HSET", "{tmd:c}:drains", "h", "x"),
            ("SMEMBERS", "{tmd:c}:jobs"),
            ("EVAL", "return 1", "0"),
        ):
            with pytest.raises(NoPermissionError):
                await client.execute_command(*command)
    finally:
        await client.aclose()
        await store.close()

    assert len(entries) == 1


async def test_no_client_is_admitted_without_a_password(port):
    for url in (f"redis://127.0.0.1:{port}", f"redis://tmd:wrong@127.0.0.1:{port}"):
        store = RedisStore(url, "c", b"key")
        try:
            with pytest.raises(StoreUnavailable):
                await store.snapshot()
        finally:
            await store.close()


async def test_a_store_behind_tls_is_used(redis_binary, tmp_path):
    with encrypted(redis_binary, tmp_path) as (port, authority):
        store = RedisStore(f"rediss://127.0.0.1:{port}?ssl_ca_certs={authority}", "c", b"key")
        try:
            async with aclosing(store.wakes()) as wakes:  # type: ignore[type-var]
                woken = await anext(wakes)
                await store.put_host(HostStatus("h1", "i"), ttl_s=5, wake=True)
                heard = await anext(wakes)
            view = await store.snapshot()
        finally:
            await store.close()

    assert (woken.topic, heard.topic) == (Topic.ALL, Topic.HOST)
    assert [h.host for h in view.hosts] == ["h1"]


@pytest.mark.parametrize(
    ("name", "trusted"), [("127.0.0.1", False), ("192.0.2.1", True)], ids=["unknown CA", "name"]
)
async def test_an_unauthenticated_server_receives_no_secret(redis_binary, tmp_path, name, trusted):
    with encrypted(redis_binary, tmp_path, name) as (port, authority):
        given = f"?ssl_ca_certs={authority}" if trusted else ""
        store = RedisStore(f"rediss://127.0.0.1:{port}{given}", "c", b"key")
        try:
            with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
                await store.snapshot()
        finally:
            await store.close()


async def test_a_plain_connection_to_a_tls_server_is_refused(redis_binary, tmp_path):
    with encrypted(redis_binary, tmp_path) as (port, _):
        store = RedisStore(f"redis://127.0.0.1:{port}", "c", b"key", timeout_s=1.0)
        try:
            with pytest.raises(StoreUnavailable):
                await store.snapshot()
        finally:
            await store.close()
