"""A foreign client that can write to Redis: no forged value is trusted and no rank moves."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import json as codec

from tests.values import alert
from tmd.core.alerts.notices import Announced
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.model import Exit, HostStatus
from tmd.core.values.requests import DrainRequest, HealthyRequest, RehearsalRequest
from tmd.daemon.redis_client import connect
from tmd.daemon.seal import RecordSeal
from tmd.daemon.store import RedisStore

KEY = b"known to the members"
DRAIN = DrainRequest(host="h1", id="d1", by="mallory")


@pytest.fixture
async def cluster(redis_url):
    """A member's store, a foreign client of the same Redis, and the prefix of the keys."""
    name = f"s{os.urandom(4).hex()}"
    store, stranger = RedisStore(redis_url, name, KEY), connect(redis_url, 2.0)
    yield store, stranger, f"{{tmd:{name}}}:"
    await store.close()
    await stranger.aclose()


def forged(value):
    """The value of a writer who knows the source but not the secret."""
    return RecordSeal(b"a guess").sealed(type(value).__name__, codec.encode(value))


@pytest.mark.parametrize("value", [codec.encode(DRAIN), forged(DRAIN), b"", b"\xff\x00", b"0" * 99])
async def test_a_forged_drain_is_ignored(cluster, value):
    store, stranger, prefix = cluster
    await store.drain(DrainRequest(host="h2", id="d2"))
    await stranger.hset(prefix + "drains", "h1", value)

    assert [d.host for d in (await store.snapshot()).drains] == ["h2"]


async def test_forged_requests_are_ignored(cluster):
    store, stranger, prefix = cluster
    await stranger.hset(prefix + "rehearsals", "h1", forged(RehearsalRequest("h1", "r")))
    await stranger.hset(prefix + "healthy", "x", forged(HealthyRequest("h1", "x")))

    assert (await store.snapshot()).rehearsals == ()
    assert await store.healthy_requests() == ()


async def test_a_forged_host_is_ignored(cluster):
    """It might report that a worker has exited, and a healthy rank would be replaced."""
    store, stranger, prefix = cluster
    await store.put_host(HostStatus("h1", "i"), ttl_s=5, wake=False)
    lie = HostStatus("h2", "i", exits=(Exit("h1/job/0.a", "job", -9, at=0.0),))
    await stranger.set(prefix + "host:h2", forged(lie))
    await stranger.sadd(prefix + "hosts", "h2")

    assert [h.host for h in (await store.snapshot()).hosts] == ["h1"]


async def test_a_forged_record_stops_deciding_and_is_not_obeyed(cluster, record):
    """If it were ignored, the job would seem unformed."""
    store, stranger, prefix = cluster
    assert await store.restore_job(record())
    await stranger.hset(prefix + "job:job", "record", forged(record(revision=9)))

    for look in (store.snapshot, store.jobs):
        with pytest.raises(StoreUnavailable, match=r"JobRecord that the secret.*delete its key"):
            await look()

    await stranger.delete(prefix + "job:job")
    assert await store.restore_job(record())
    assert (await store.jobs()).records == (record(),)


async def test_a_forged_breaker_stops_deciding(cluster):
    store, stranger, prefix = cluster
    await stranger.set(prefix + "breaker", forged(Breaker()))

    with pytest.raises(StoreUnavailable, match="Breaker that the secret of this host"):
        await store.snapshot()


async def test_a_forged_alert_is_not_passed_on(cluster):
    """'tmd events', the page and the webhook skip it; a direct reader of Redis must trust Redis."""
    store, stranger, prefix = cluster
    one = alert(id="1")
    await stranger.xadd(prefix + "alerts", {"alert": codec.encode(one)})
    await stranger.xadd(prefix + "alerts", {"alert": codec.encode(one), "seal": "0" * 64})
    await stranger.xadd(prefix + "alerts", {"text": "hello"})
    await store.publish_alert(alert(id="2"))
    await stranger.set(prefix + "told-outside", forged(Announced()))

    assert [a.id for _, a in await store.alerts("", limit=9)] == ["2"]
    assert await store.announced() is None


async def test_a_seal_holds_for_one_kind_only(cluster):
    """A rehearsal request copied to another table would move a rank."""
    store, stranger, prefix = cluster
    await store.rehearse(RehearsalRequest("h1", "r"))
    (asked,) = (await stranger.hgetall(prefix + "rehearsals")).values()
    await stranger.hset(prefix + "drains", "h1", asked)

    assert (await store.snapshot()).drains == ()


async def test_the_drain_of_one_host_does_not_stand_for_another(cluster):
    """A copy of it is shown nowhere, and keeps nobody from draining that host."""
    store, stranger, prefix = cluster
    await store.drain(DrainRequest("h1", "d1", leave=True))
    await stranger.hset(prefix + "drains", "h2", await stranger.hget(prefix + "drains", "h1"))
    shown = (await store.snapshot()).drains
    await store.drain(DrainRequest("h2", "d2", soft=True))

    assert [d.id for d in shown] == ["d1"]
    assert [d.id for d in (await store.snapshot()).drains] == ["d1", "d2"]


async def test_a_value_of_another_cluster_counts_as_forged(cluster, redis_url):
    store, stranger, prefix = cluster
    other = RedisStore(redis_url, "other", b"its own key")
    try:
        await other.drain(DRAIN)
        ((_, value),) = (await stranger.hgetall("{tmd:other}:drains")).items()
        await stranger.hset(prefix + "drains", "h1", value)
    finally:
        await other.close()

    assert (await store.snapshot()).drains == ()


async def test_people_can_read_what_is_stored(cluster):
    store, stranger, prefix = cluster
    await store.drain(DRAIN)
    value = await stranger.hget(prefix + "drains", "h1")

    assert json.loads(value.partition(b" ")[2])["by"] == "mallory"


@given(st.binary(max_size=200), st.binary(min_size=1, max_size=8), st.integers(0, 1 << 16))
def test_any_change_breaks_the_seal(body, change, place):
    seal = RecordSeal(KEY)
    value = seal.sealed("K", body)
    at = place % len(value)
    spoilt = value[:at] + change + value[at + len(change) :]

    assert seal.opened("K", value) == body
    assert spoilt == value or seal.opened("K", spoilt) is None
