"""No value in Redis, at any key, ends a daemon, makes it decide or fills its log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time

import pytest

from tests.daemon.cluster import Cluster
from tests.daemon.hostile import KEYS, STRINGS, TYPES, heal, strike
from tests.values import alert
from tests.values import record as record_of
from tmd.core.alerts.notices import Announced
from tmd.core.planning.election import Denied, Granted
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.errors import Conflict, StaleLease, StoreUnavailable
from tmd.core.values.model import HostStatus
from tmd.core.values.requests import DrainRequest, HealthyRequest, RehearsalRequest
from tmd.daemon.redis_client import connect
from tmd.daemon.store import RedisStore

KEY = b"known to the members"
LINES = 60
"""Log bytes per daemon allowed for everything that one test does."""


@pytest.fixture
async def cluster(redis_url):
    """A member's store, a foreign client of the same Redis, and the prefix of the keys."""
    name = f"s{os.urandom(4).hex()}"
    store, stranger = RedisStore(redis_url, name, KEY), connect(redis_url, 5.0)
    prefix = f"{{tmd:{name}}}:"
    yield store, stranger, prefix
    await heal(stranger, prefix)
    await store.close()
    await stranger.aclose()


RECORD = record_of("h1", "h2", revision=3, lease_epoch=5)


def calls(store):
    """Every request that a daemon or a verb makes."""
    return [
        store.snapshot(),
        store.jobs(),
        store.leader(),
        store.alerts("", limit=100),
        store.newest_alert(),
        store.announced(),
        store.healthy_requests(),
        store.put_host(HostStatus("h1", "i"), ttl_s=5, wake=True),
        store.acquire("h1#1", ttl_s=1.0, floor=7),
        store.release("h1#1"),
        store.put_job(RECORD, expected=2),
        store.restore_job(RECORD),
        store.publish_alert(alert()),
        store.holds_alert(alert()),
        store.put_announced(Announced()),
        store.drain(DrainRequest("h1", "d")),
        store.undrain("h1"),
        store.rehearse(RehearsalRequest("h1", "r")),
        store.declare_healthy(HealthyRequest("h1", "x")),
        store.healthy_served(HealthyRequest("h1", "x")),
        store.set_paused(True),
        store.set_paused(False),
        store.set_breaker(Breaker()),
        store.probe(),
    ]


@pytest.mark.parametrize("key", KEYS)
async def test_each_request_is_answered_or_refused(cluster, key):
    """Only errors that callers handle are raised, and no forged value is trusted."""
    store, stranger, prefix = cluster
    chance = random.Random(key)
    refused, epochs = [], []
    for kind in TYPES:
        for _ in range(3):
            await heal(stranger, prefix)
            await store.put_job(record_of("h1", "h2", revision=2, lease_epoch=4), expected=0)
            await store.put_host(HostStatus("h1", "i"), ttl_s=60, wake=False)
            await strike(stranger, prefix, key, kind, chance)
            for call in calls(store):
                try:
                    found = await call
                except (StoreUnavailable, StaleLease, Conflict) as error:
                    refused.append(str(error))
                    continue
                if isinstance(found, Granted):
                    epochs.append(found.epoch)

    assert all(reason.strip() for reason in refused)
    assert refused or key == "paused", "no value was in anybody's way: none arrived"
    assert all(epoch < 10**15 for epoch in epochs)


@pytest.mark.parametrize("text", STRINGS)
async def test_a_forged_lease_expires(cluster, text):
    """It has no expiry; it gets that of a lease, and then a member leads."""
    store, stranger, prefix = cluster
    await stranger.set(prefix + "leader", text)
    began = time.monotonic()
    first = await store.acquire("h1#1", ttl_s=0.3, floor=0)
    lapse = first.remaining_s if isinstance(first, Denied) else 0.0
    again = await store.acquire("h2#1", ttl_s=0.3, floor=0)
    until_again = time.monotonic() - began
    await asyncio.sleep(lapse / 2)
    later = await store.acquire("h1#1", ttl_s=0.3, floor=0)
    until_later = time.monotonic() - began
    await asyncio.sleep(lapse / 2)
    granted = await store.acquire("h1#1", ttl_s=0.3, floor=0)

    assert isinstance(first, Denied) or text == b""
    assert isinstance(granted, Granted)
    assert lapse <= 0.3
    if lapse:  # requests of others do not delay it
        for asked, left_s, passed_s in (
            (again, lapse, until_again),
            (later, lapse / 2, until_later),
        ):
            # On a busy host it may have lapsed by then, but not earlier.
            if isinstance(asked, Granted):
                assert passed_s >= lapse
            else:
                assert asked.remaining_s <= left_s
    assert 0 < granted.epoch < 10**15


@pytest.mark.parametrize("text", STRINGS)
async def test_a_forged_epoch_does_not_stop_elections(cluster, text):
    store, stranger, prefix = cluster
    await stranger.set(prefix + "epoch", text)
    first = await store.acquire("h1#1", ttl_s=5, floor=10)
    await store.release("h1#1")
    second = await store.acquire("h1#1", ttl_s=5, floor=first.epoch)

    assert 10 < first.epoch < second.epoch <= 10**15 + 1


@pytest.mark.parametrize("epoch", ["900000000000000", "999999999999999"])
async def test_an_own_lease_with_an_impossible_epoch_is_refused(cluster, epoch):
    """Leading with it would make every later epoch look forged."""
    store, stranger, prefix = cluster
    await stranger.set(prefix + "leader", f"h1#1|{epoch}", px=200)
    first = await store.acquire("h1#1", ttl_s=0.2, floor=0)
    await asyncio.sleep(0.25)
    second = await store.acquire("h1#1", ttl_s=5, floor=0)

    assert isinstance(first, Denied)
    assert second.epoch < int(epoch)


async def test_alerts_after_a_page_of_forged_ones_are_found(cluster):
    store, stranger, prefix = cluster
    for _ in range(7):
        await stranger.xadd(prefix + "alerts", {"alert": b"{}"})
    await store.publish_alert(alert(id="real"))

    assert [a.id for _, a in await store.alerts("", limit=3)] == ["real"]


async def test_a_fence_in_the_future_is_outbid(cluster):
    """The refused leader leads again under an epoch above the fence."""
    store, stranger, prefix = cluster
    granted = await store.acquire("h1#1", ttl_s=5, floor=0)
    await store.put_job(record_of("h1", revision=1, lease_epoch=granted.epoch), expected=0)
    await stranger.hset(prefix + "job:job", "fence", str(granted.epoch + 10**9))
    with pytest.raises(StaleLease) as refused:
        await store.put_job(record_of("h1", revision=2, lease_epoch=granted.epoch), expected=1)
    await store.release("h1#1")
    again = await store.acquire("h1#1", ttl_s=5, floor=refused.value.fence)
    await store.put_job(record_of("h1", revision=2, lease_epoch=again.epoch), expected=1)

    assert [r.revision for r in (await store.jobs()).records] == [2]


async def test_a_forged_revision_outside_the_seal_is_refused(cluster):
    """Otherwise the leader would write against it in vain, again and again."""
    store, stranger, prefix = cluster
    await store.put_job(record_of("h1", revision=1, lease_epoch=1), expected=0)
    await stranger.hset(prefix + "job:job", "revision", "9")

    with pytest.raises(StoreUnavailable, match=r"redis-cli DEL '.*job:job'"):
        await store.jobs()


async def test_a_sealed_value_copied_to_another_name_is_refused(cluster):
    store, stranger, prefix = cluster
    await store.put_host(HostStatus("h1", "i"), ttl_s=60, wake=False)
    await store.drain(DrainRequest("h1", "d"))
    await store.put_job(record_of("h1", revision=1, lease_epoch=1), expected=0)
    await stranger.copy(prefix + "host:h1", prefix + "host:h9")
    await stranger.sadd(prefix + "hosts", "h9")
    (asked,) = (await stranger.hgetall(prefix + "drains")).values()
    await stranger.hset(prefix + "drains", "h9", asked)
    view = await store.snapshot()
    await stranger.copy(prefix + "job:job", prefix + "job:copy")
    await stranger.sadd(prefix + "jobs", "copy")

    assert [h.host for h in view.hosts] == ["h1"]
    assert [d.host for d in view.drains] == ["h1"]
    with pytest.raises(StoreUnavailable, match="job:copy"):
        await store.snapshot()


async def test_a_key_of_a_wrong_type_is_named(cluster):
    store, stranger, prefix = cluster
    await stranger.rpush(prefix + "drains", "x")

    with pytest.raises(StoreUnavailable, match=r":drains' holds a list, .*delete it"):
        await store.snapshot()


async def test_daemons_survive_forged_values_and_decide_nothing(tmp_path, redis):
    """Two daemons with a running job; after the forged values are removed, they answer a drain."""
    chance = random.Random(17)
    async with Cluster(tmp_path, redis) as cluster:
        await cluster.formed()
        before = await cluster.record()
        stranger, prefix = connect(redis.url, 5.0), "{tmd:test}:"
        async with contextlib.aclosing(stranger):
            for key in KEYS:
                kind = chance.choice(TYPES)
                await strike(stranger, prefix, key, kind, chance)
                await stranger.publish(prefix + "wake", chance.choice(STRINGS[:-1]))
                await _turns(cluster, stranger)
            await heal(stranger, prefix)

        async def restored():
            return (await cluster.store.jobs()).records == (before,)

        await cluster.until(restored, "the record is back as it was")
        alive = {host: process.returncode for host, process in cluster.daemons.items()}
        logs = {p.parent.name: p.read_text() for p in tmp_path.glob("*/log")}
        await cluster.store.drain(DrainRequest("h1", "real"))

        async def decided():
            return (await cluster.record()).plan is not None

        await cluster.until(decided, "the member's drain is planned")

        assert alive == {"h1": None, "h2": None}
        assert all("Traceback" not in log for log in logs.values())
        assert [h for h, log in logs.items() if log.count("\n") > LINES] == [], logs


async def _turns(cluster, stranger, number=15):
    """Wait until the daemons have asked Redis so often that their loops have turned."""
    wanted = await _evals(stranger) + number

    async def asked():
        return await _evals(stranger) >= wanted

    await cluster.until(asked, "the daemons go on asking")


async def _evals(stranger):
    stats = await stranger.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))
