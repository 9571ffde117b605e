"""Two machines with one host name: the one that wrote its heartbeat first has the name."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.daemon.tasks import running
from tmd.core.alerts.store_health import StoreLoop
from tmd.daemon.bus import WakeEvent
from tmd.daemon.journal import Journal
from tmd.daemon.publisher import HeartbeatSources, Publisher, PublisherConfig
from tmd.daemon.records import Records
from tmd.daemon.roster import Roster
from tmd.daemon.store_health import StoreHealth
from tmd.daemon.watcher import AlertSinks, Watcher
from tmd.testing import MemoryStore
from tmd.testing.clients import until

pytestmark = pytest.mark.looptime

TTL_S = 3.0


class Stopping(WakeEvent):
    """Waits ``stands_s`` longer than it is asked to."""

    stands_s = 0.0

    async def wait(self, timeout_s: float) -> bool:
        found = await super().wait(timeout_s)
        await asyncio.sleep(self.stands_s)
        return found


class Machine:
    """Its daemon, as far as it writes heartbeats."""

    def __init__(self, store: MemoryStore, folder: Path, boot: str, incarnation: str = "i"):
        self.health = StoreHealth()
        self._store = store
        client, self.roster = store.client(), Roster()
        self.roster.urgent = Stopping()
        self._journal = Journal(folder / f"{boot}-{incarnation}.sqlite")
        sinks = AlertSinks(client, self.health, self._journal)
        watcher = Watcher("h1", incarnation, [], self.roster, sinks)
        self._publisher = Publisher(
            PublisherConfig("h1", incarnation, boot, False, 1.0, TTL_S),
            HeartbeatSources(self.roster, watcher, Records(folder)),
            client,
            self.health,
        )

    @property
    def trouble(self) -> str:
        return self.health.state.failing.get(StoreLoop.HEARTBEAT, "")

    @asynccontextmanager
    async def runs(self):
        try:
            async with running(self._publisher):
                yield self
        finally:
            self._journal.close()


@pytest.fixture
def cluster():
    return MemoryStore()


async def seen(store):
    """The machine and the daemon that are seen as host h1."""
    found = (await store.client().snapshot()).host("h1")
    return found and (found.boot, found.incarnation)


async def seen_for(store, seconds):
    """All that are seen as h1 during ``seconds``, with `None` for nobody."""
    found = set()
    for _ in range(int(seconds * 100)):
        found.add(await seen(store))
        await asyncio.sleep(0.01)
    return found


async def test_a_machine_with_the_name_of_another_one_is_not_seen_and_says_why(cluster, tmp_path):
    async with Machine(cluster, tmp_path, "first").runs() as first:
        await until(lambda: first.health.state.written, every_s=0.01)
        async with Machine(cluster, tmp_path, "second").runs() as second:
            found = await seen_for(cluster, 10 * TTL_S)

            assert found == {("first", "i")}
            assert first.trouble == ""
            assert "not seen as host 'h1', since" in second.trouble
            assert "come from another boot (first)" in second.trouble
            assert "over within 6 s" in second.trouble
            assert not second.health.state.written


async def test_a_machine_that_stood_still_asks_for_its_name_again(cluster, tmp_path):
    """Another one may have got it meanwhile, and would write by turns with it."""
    async with Machine(cluster, tmp_path, "first").runs() as first:
        await until(lambda: first.health.state.written, every_s=0.01)
        first.roster.urgent.stands_s = 2 * TTL_S  # its process is stopped: it knows of no outage
        async with Machine(cluster, tmp_path, "second").runs() as second:
            await until(lambda: second.health.state.written, within_s=3 * TTL_S, every_s=0.01)
            found = await seen_for(cluster, 10 * TTL_S)

            assert found == {("second", "i")}
            assert "another boot (second)" in first.trouble


async def test_of_machines_that_start_together_one_has_the_name(cluster, tmp_path):
    async with (
        Machine(cluster, tmp_path, "first").runs(),
        Machine(cluster, tmp_path, "second").runs(),
        Machine(cluster, tmp_path, "third").runs(),
    ):
        await asyncio.sleep(0.01)

        assert len(await seen_for(cluster, 10 * TTL_S)) == 1


async def test_the_next_daemon_of_the_same_machine_is_seen_at_once(cluster, tmp_path):
    async with Machine(cluster, tmp_path, "first").runs() as first:
        await until(lambda: first.health.state.written, every_s=0.01)
    async with Machine(cluster, tmp_path, "first", "j").runs():
        await asyncio.sleep(0.01)

        assert await seen(cluster) == ("first", "j")


async def test_a_machine_gets_the_name_once_the_other_one_is_silent(cluster, tmp_path):
    """So does a machine that boots again within the time to live of its heartbeat."""
    async with Machine(cluster, tmp_path, "first").runs() as first:
        await until(lambda: first.health.state.written, every_s=0.01)
    async with Machine(cluster, tmp_path, "second").runs() as second:
        await until(lambda: second.health.state.written, within_s=3 * TTL_S, every_s=0.01)

        assert await seen(cluster) == ("second", "i")
        assert second.trouble == ""


@pytest.mark.parametrize("outage_s", [1.0, 20.0])
async def test_an_outage_of_the_store_does_not_cost_a_machine_its_name(cluster, tmp_path, outage_s):
    """Also not if its last heartbeat expires meanwhile."""
    async with Machine(cluster, tmp_path, "first").runs() as first:
        await until(lambda: first.health.state.written, every_s=0.01)
        async with Machine(cluster, tmp_path, "second").runs() as second:
            await until(lambda: bool(second.trouble), every_s=0.01)
            for _ in range(8):  # which of them asks first is random
                cluster.fall_away()
                await asyncio.sleep(outage_s)
                cluster.away = False
                await until(lambda: not first.trouble, within_s=TTL_S, every_s=0.01)

                assert await seen_for(cluster, 2 * TTL_S) == {("first", "i")}
