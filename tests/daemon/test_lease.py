"""Keeping the lease, on fake time."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from tests.daemon.tasks import running
from tmd.core.values.limits import PlanLimits
from tmd.daemon.candidate import Candidate, LeaderConfig
from tmd.daemon.records import Records
from tmd.daemon.store_health import StoreHealth
from tmd.testing import MemoryStore
from tmd.testing.clients import until
from tmd.testing.store import MemoryClient

pytestmark = pytest.mark.looptime

TTL, RENEW = 9.0, 3.0


def candidate(store, name, tmp_path, client=None):
    config = LeaderConfig(name, ttl_s=TTL, renew_s=RENEW, poll_s=1.0, limits=PlanLimits())
    return Candidate(client or store.client(), config, Records(tmp_path / name), StoreHealth())


@contextlib.asynccontextmanager
async def leading(store, tmp_path):
    """A candidate that runs, from when it leads."""
    one = candidate(store, "a", tmp_path)
    async with running(one):
        await until(lambda: one.leading, within_s=60, every_s=0.01)
        yield one


async def test_a_holder_leads_for_hours(tmp_path):
    """It renews forever under one lease epoch."""
    store = MemoryStore()
    one = candidate(store, "a", tmp_path)
    async with running(one):
        await asyncio.sleep(1)
        epoch = one.lease.epoch
        for _ in range(3600):
            await asyncio.sleep(1)
            assert one.leading

    assert one.lease.epoch == epoch


async def test_there_is_never_more_than_one_leader(tmp_path):
    """Three candidates, outages of all lengths: never do two believe that they lead."""
    store = MemoryStore()
    group = [candidate(store, name, tmp_path) for name in "abc"]
    changes = set()
    async with running(*group):
        for turn in range(2000):
            await asyncio.sleep(0.1)
            if turn % 200 == 100:
                store.fall_away()
            if turn % 200 == 110 + turn // 20:
                store.away = False
            leading = [c.lease.epoch for c in group if c.leading]
            assert len(leading) <= 1
            changes.update(leading)

    assert changes


async def test_a_dead_leader_is_replaced_within_its_ttl(tmp_path):
    store = MemoryStore()
    one = candidate(store, "a", tmp_path)
    async with running(one):
        await store.client().acquire("dead", ttl_s=TTL, floor=0)
        started = asyncio.get_running_loop().time()
        await until(lambda: one.leading, within_s=60, every_s=0.01)
        took = asyncio.get_running_loop().time() - started

    assert took < TTL + 0.2


async def test_a_leader_that_stops_hands_over_at_once(tmp_path):
    """The wake-up saves a period: the follower does not wait for its next attempt."""
    store = MemoryStore()
    one, two = candidate(store, "a", tmp_path), candidate(store, "b", tmp_path)
    async with running(one):
        await until(lambda: one.leading, within_s=60, every_s=0.01)
        async with running(two):
            await asyncio.sleep(0.5)

            async def listen():
                async for _ in store.listen():
                    two.vacant.ring()

            ears = asyncio.create_task(listen())
            await asyncio.sleep(0.01)
            await one.step_down()
            await asyncio.sleep(0.01)
            leading = (one.leading, two.leading)
            ears.cancel()

    assert leading == (False, True)


async def test_a_leader_without_the_store_stops_before_its_lease_expires(tmp_path):
    store = MemoryStore()
    async with leading(store, tmp_path) as one:
        store.fall_away()
        assert store.lease is not None
        lapses = store.lease[2]
        await until(lambda: not one.leading, within_s=60, every_s=0.01)
        stopped = asyncio.get_running_loop().time()
        store.away = False
        await until(lambda: one.leading, within_s=60, every_s=0.01)

    assert stopped < lapses


async def test_a_lease_is_given_back_though_its_answer_has_not_come(tmp_path):
    """A daemon ends while Redis waits for a replica. The next one must not wait for its TTL."""
    store = MemoryStore()

    class SlowAnswers(MemoryClient):
        async def acquire(self, *args, **named):
            answer = await super().acquire(*args, **named)
            await asyncio.sleep(1)
            return answer

    one = candidate(store, "a", tmp_path, SlowAnswers(store))
    async with running(one):
        await until(lambda: store.lease is not None, within_s=60, every_s=0.01)
        assert not one.leading

    assert store.lease is None


async def test_the_epoch_grows_when_the_store_lost_everything(tmp_path):
    store = MemoryStore()
    async with leading(store, tmp_path) as one:
        before = one.lease.epoch
        store.wipe()
        store.clock_epoch = 0  # and even the server's clock went back
        await asyncio.sleep(RENEW)

    assert one.lease.epoch > before


async def test_a_lost_answer_never_interrupts_a_leader(tmp_path):
    """The store does not answer for longer than the leader waits between two renewals."""
    store = MemoryStore()
    async with leading(store, tmp_path) as one:
        store.fall_away()
        led = [await leads_for(one, 0.6 * TTL)]
        store.away = False
        led.append(await leads_for(one, TTL))

    assert led == [True, True]


async def leads_for(one, seconds):
    """Whether it leads all the time."""
    led = []
    for _ in range(int(100 * seconds)):
        await asyncio.sleep(0.01)
        led.append(one.leading)
    return all(led)


async def test_a_candidate_that_gives_way_leaves_the_lease_to_another(tmp_path):
    """It asks for the lease again only once all others have had the time to take it."""
    store = MemoryStore()
    one, two = candidate(store, "a", tmp_path), candidate(store, "b", tmp_path)
    async with running(one):
        await until(lambda: one.leading, within_s=60, every_s=0.01)
        async with running(two):
            await asyncio.sleep(0.5)
            gives = one.give_way_to(frozenset({"b"}))
            await one.step_down()
            one.vacant.ring()  # as the store's message does, which reaches this one, too
            await until(lambda: two.leading, within_s=TTL, every_s=0.01)
            again = one.give_way_to(frozenset({"b"}))

    assert (gives, again) == (True, False)


@contextlib.asynccontextmanager
async def hearing(store, *group):
    """Candidates that are told when a leader has stepped down."""

    async def listen(one):
        async for _ in store.listen():
            one.vacant.ring()

    async with running(*group):
        ears = [asyncio.create_task(listen(one)) for one in group]
        yield
        for ear in ears:
            ear.cancel()


async def test_hosts_that_cannot_read_a_record_win_the_lease_once_each_at_most(tmp_path):
    """Also where each takes half a lease to notice, and all are faster than the one that can."""
    store = MemoryStore()
    old = [candidate(store, name, tmp_path) for name in "abcdef"]
    new = candidate(store, "n", tmp_path)
    led = []

    async def notice(one):
        while True:
            await one.elected.wait(1.0)
            if one.leading:
                led.append(one.holder)
                await asyncio.sleep(TTL / 2)
                if one.give_way_to(frozenset({"n"})):
                    await one.step_down()

    async with hearing(store, *old, new):
        notices = [asyncio.create_task(notice(one)) for one in old]
        await until(lambda: new.leading, within_s=20 * TTL, every_s=0.01)
        await asyncio.sleep(10 * TTL)
        for task in notices:
            task.cancel()

        assert new.leading
    assert len(led) == len(set(led)) > 0


async def test_a_candidate_that_gave_way_abstains_while_any_other_leads(tmp_path):
    """It is no candidate at the moment at which that one steps down, but some time later."""
    store = MemoryStore()
    one, other = candidate(store, "a", tmp_path), store.client()
    async with running(one):
        await until(lambda: one.leading, within_s=60, every_s=0.01)
        one.give_way_to(frozenset({"n"}))
        await one.step_down()
        await other.acquire("b", ttl_s=9 * TTL, floor=0)
        await asyncio.sleep(3 * TTL)
        await other.release("b")
        one.vacant.ring()
        await asyncio.sleep(TTL - RENEW - 0.1)
        waited = not one.leading
        await until(lambda: one.leading, within_s=TTL, every_s=0.01)

    assert waited


async def test_a_candidate_that_gave_way_in_vain_leads_again(tmp_path):
    """The other host may not be one that may lead."""
    store = MemoryStore()
    async with leading(store, tmp_path) as one:
        one.give_way_to(frozenset({"b"}))
        await one.step_down()
        await until(lambda: one.leading, within_s=TTL + RENEW, every_s=0.01)

        assert not one.give_way_to(frozenset({"b"}))
