"""Whatever fails: each alert is in the stream once, in the order in which it was raised."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.daemon.tasks import running
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.model import Severity, Signal, Strategy
from tmd.daemon.journal import Journal
from tmd.daemon.roster import Roster
from tmd.daemon.store_health import StoreHealth
from tmd.daemon.watcher import AlertSinks, Watcher
from tmd.testing import MemoryClient, MemoryStore


class Unsteady(MemoryClient):
    """A connection whose calls fail before or after they are carried out."""

    def __init__(self, store, faults):
        super().__init__(store)
        self._store_of_all = store
        self._faults = faults
        """One outcome for each coming call; later calls succeed."""

    async def publish_alert(self, alert):
        fault = self._next()
        if fault != "lost answer":
            return await super().publish_alert(alert)
        await super().publish_alert(alert)
        raise StoreUnavailable("the answer was lost")

    async def holds_alert(self, alert):
        self._next()
        return await super().holds_alert(alert)

    def _next(self):
        fault = self._faults.pop(0) if self._faults else "none"
        if fault == "emptied":
            self._store_of_all.wipe()  # a server that restarts breaks the connection
        if fault in ("away", "emptied"):
            raise StoreUnavailable(fault)
        return fault


class Hasty(StoreHealth):
    """Retries at once."""

    async def failed(self, activity, error):
        await asyncio.sleep(0)


async def live(store, journal, lives):
    """Run daemons one after the other on the same journal; returns the ids that were raised."""
    raised = []
    for number, (faults, findings) in enumerate(lives):
        client = Unsteady(store, list(faults))
        watcher = Watcher("h", f"boot{number}", [], Roster(), AlertSinks(client, Hasty(), journal))
        async with running(watcher):
            for finding, turns in enumerate(findings):
                for _ in range(turns):
                    await asyncio.sleep(0)
                signal = Signal("a.b", f"gpu:{finding}", Severity.WARNING)
                watcher.fold(signal, "d", Strategy.OBSERVE)
                raised.append(f"h-boot{number}-{finding + 1}")
            if number + 1 < len(lives):
                for _ in range(5):  # the next daemon takes over with work pending
                    await asyncio.sleep(0)
            else:
                await settled(watcher, store, client, journal, len(raised))
    return raised


async def settled(watcher, store, client, journal, number):
    async with asyncio.timeout(20):
        while client._faults or len(store.stream) < number or await journal.waiting(1):
            watcher.posted.ring()
            await asyncio.sleep(0)


FAULTS = st.lists(st.sampled_from(["none", "away", "lost answer", "emptied"]), max_size=12)
FINDINGS = st.lists(st.integers(0, 8), min_size=1, max_size=6)


@settings(deadline=None)
@given(st.lists(st.tuples(FAULTS, FINDINGS), min_size=1, max_size=4))
def test_each_alert_is_in_the_stream_once_in_its_order(lives):
    store = MemoryStore()
    journal = Journal(None)
    with ThreadPoolExecutor(1) as thread:
        # In its own thread: asyncio.run would remove pytest-asyncio's loop. A journal in memory
        # belongs to the thread that first uses it.
        work = live(store, journal, lives)
        raised = thread.submit(asyncio.run, work).result()
        thread.submit(journal.close).result()

    assert [alert.id for alert in store.stream] == raised
