"""Alerts on the host's disk: across restarts, outages, and failing disks."""

from __future__ import annotations

import asyncio
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import pytest
import structlog

from tests import values
from tests.daemon.tasks import running
from tmd import embedded
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.model import Severity, Signal, Strategy
from tmd.daemon.journal import Journal
from tmd.daemon.ledger import Bounds, Ledger
from tmd.daemon.roster import Roster
from tmd.daemon.store import RedisStore
from tmd.daemon.store_health import StoreHealth
from tmd.daemon.watcher import AlertSinks, Watcher
from tmd.testing.clients import until

WITHIN_S = 20.0


def alert(number, message=""):
    return values.alert(id=f"h1-{number}", message=message)


@contextmanager
def opened(path, bounds=None, **changes):
    with closing(Journal(path, bounds, **changes)) as journal:
        yield journal


async def ids(journal):
    return [a.id for _, a in await journal.waiting(1000)]


async def test_unpublished_alerts_survive_a_restart_in_order(tmp_path):
    path = tmp_path / "alerts.sqlite"
    with opened(path) as journal:
        await journal.add([alert(1), alert(2)])
        await journal.add([alert(3)])
        (first, _), *_ = await journal.waiting(1)
        await journal.published([first])
    with opened(path) as journal:
        waiting = [a for _, a in await journal.waiting(10)]
        last = await journal.last_published()
        await journal.forget_published()
        again = await ids(journal)

    assert waiting == [alert(2), alert(3)]
    assert last == alert(1)
    assert again == ["h1-1", "h1-2", "h1-3"]


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.daemon.test_journal import Journal, alert

async def main():
    journal = Journal(Path(sys.argv[1]))
    await journal.add([alert(1), alert(2)])
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_added_alerts_survive_a_kill(tmp_path):
    path = tmp_path / "j"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=root, timeout=60)
    with closing(Ledger(str(path), Bounds())) as ledger:
        found = [a.id for _, a in ledger.waiting(10)]

    assert done.returncode == -signal.SIGKILL
    assert found == ["h1-1", "h1-2"]


async def test_it_is_bounded_by_number_and_published_alerts_go_first(tmp_path):
    with opened(tmp_path / "j", Bounds(alerts=4)) as journal:
        await journal.add([alert(n) for n in range(4)])
        await journal.published([n for n, a in await journal.waiting(10) if a.id == "h1-2"])
        await journal.add([alert(4)])
        without_the_published = await ids(journal)
        await journal.add([alert(5)])
        without_the_oldest = await ids(journal)

    assert without_the_published == ["h1-0", "h1-1", "h1-3", "h1-4"]
    assert without_the_oldest == ["h1-1", "h1-3", "h1-4", "h1-5"]


def test_only_published_alerts_grow_old(tmp_path):
    """An outage may last longer than published alerts are kept."""
    with closing(Ledger(str(tmp_path / "j"), Bounds(seconds=10))) as ledger:
        ledger.add([alert(1), alert(2)], now=0)
        ledger.published([1])
        ledger.add([alert(3)], now=9)
        kept = ledger.last_published()
        ledger.add([alert(4)], now=11)

        assert kept == alert(1)
        assert ledger.last_published() is None
        assert [a.id for _, a in ledger.waiting(10)] == ["h1-2", "h1-3", "h1-4"]


def test_a_row_of_another_version_is_skipped(tmp_path):
    path = tmp_path / "j"
    with closing(Ledger(str(path), Bounds())) as ledger:
        ledger.add([alert(1), alert(2)], now=0)
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("UPDATE alerts SET body = ? WHERE number = 1", (b'{"v":9}',))
    with closing(Ledger(str(path), Bounds())) as ledger:
        assert [a.id for _, a in ledger.waiting(1)] == ["h1-2"]


async def test_a_damaged_file_is_moved_aside(tmp_path):
    path = tmp_path / "j"
    path.write_bytes(b"no database " * 1000)
    with opened(path) as journal:
        await journal.add([alert(1)])
    with opened(path) as journal:
        assert await ids(journal) == ["h1-1"]

    assert (tmp_path / "j.broken").read_bytes().startswith(b"no database")


async def test_a_disk_that_cannot_be_written_is_replaced_by_memory_until_it_works(tmp_path):
    """It is logged once; when the disk works again, everything is on it."""
    folder = tmp_path / "state"
    folder.write_text("a file where a folder should be")
    with structlog.testing.capture_logs() as lines:
        with opened(folder / "j", retry_s=0.0) as journal:
            for number in range(3):
                await journal.add([alert(number)])
            in_memory = await ids(journal)
            folder.unlink()
            folder.mkdir()
            await journal.add([alert(3)])
        with opened(folder / "j") as journal:
            on_disk = await ids(journal)

    assert in_memory == ["h1-0", "h1-1", "h1-2"]
    assert on_disk == ["h1-0", "h1-1", "h1-2", "h1-3"]
    assert [line["log_level"] for line in lines] == ["warning", "info"]


async def test_alerts_that_find_the_disk_broken_at_the_same_time_are_all_kept(tmp_path):
    (tmp_path / "state").write_text("a file where a folder should be")
    with structlog.testing.capture_logs() as lines, opened(tmp_path / "state" / "j") as journal:
        await asyncio.gather(*(journal.add([alert(number)]) for number in range(3)))
        found = await ids(journal)

    assert sorted(found) == ["h1-0", "h1-1", "h1-2"]
    assert len(lines) == 1


@contextmanager
def files_at_most(size):
    """Limit the size of this process's files to ``size`` bytes, by the kernel."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_full_disk_loses_no_alert(tmp_path):
    path = tmp_path / "j"
    with opened(path) as journal:
        await journal.add([alert(0)])
        size = (tmp_path / "j-wal").stat().st_size
        with files_at_most(size + 16_384):
            for number in range(1, 50):
                await journal.add([alert(number, "x" * 1000)])
        found = await ids(journal)
    with opened(path) as journal:
        on_disk = await ids(journal)

    assert found == [f"h1-{n}" for n in range(50)]
    assert 0 < len(on_disk) < 50  # the disk was full


async def test_what_a_full_disk_had_comes_before_what_is_added_meanwhile(tmp_path):
    with opened(tmp_path / "j") as journal:
        await journal.add([alert(number) for number in range(3)])

        async def later():
            await until(lambda: journal._memory is not None)
            await journal.add([alert(8)])

        with files_at_most((tmp_path / "j-wal").stat().st_size):
            adding = (journal.add([alert(number)]) for number in range(3, 8))
            await asyncio.gather(*adding, later())
        found = await ids(journal)

    assert found[:3] == ["h1-0", "h1-1", "h1-2"]
    assert sorted(found) == [f"h1-{n}" for n in range(9)]


async def test_a_disk_that_fills_up_during_a_backlog_loses_no_alert(tmp_path):
    """Redis was away and is back: what could not be marked on the disk is published again."""
    path, accepted = tmp_path / "j", []
    with opened(path) as journal:
        await journal.add([alert(number) for number in range(4)])
        await journal.published([number for number, _ in await journal.waiting(4)])
        await journal.add([alert(number) for number in range(4, 30)])
        with files_at_most((tmp_path / "j-wal").stat().st_size):
            while batch := await journal.waiting(10):
                accepted += [a.id for _, a in batch]
                await journal.published([number for number, _ in batch])

    assert accepted[:10] == accepted[10:20]  # the disk was full
    assert accepted[10:] == [f"h1-{n}" for n in range(4, 30)]


async def test_without_a_thread_memory_replaces_the_disk(tmp_path, monkeypatch):
    """As when the process may start no more threads."""

    def refused(_):
        raise RuntimeError("can't start new thread")

    path = tmp_path / "j"
    with opened(path, retry_s=0.0) as journal:
        with monkeypatch.context() as scarce:
            scarce.setattr(threading.Thread, "start", refused)
            await journal.add([alert(0)])
            await journal.add([alert(1)])
            in_memory = await ids(journal)
        await journal.add([alert(2)])
    with opened(path) as journal:
        on_disk = await ids(journal)

    assert in_memory == ["h1-0", "h1-1"]
    assert on_disk == ["h1-0", "h1-1", "h1-2"]


async def test_a_hanging_disk_is_replaced_by_memory(tmp_path):
    """Another process holds the file: meanwhile memory is used."""
    path = tmp_path / "j"
    with opened(path) as journal:
        await journal.add([alert(0)])
    with (
        opened(path, patience_s=0.05, retry_s=0.0) as journal,
        closing(sqlite3.connect(path, isolation_level=None)) as other,
    ):
        other.execute("BEGIN EXCLUSIVE")
        await journal.add([alert(1)])
        await journal.add([alert(2)])
        meanwhile = await ids(journal)
        other.execute("ROLLBACK")

    assert meanwhile == ["h1-1", "h1-2"]


# --- from the journal to a real Redis -------------------------------------------------------------


@asynccontextmanager
async def watcher_of(path, url, boot):
    """A watcher without detectors that publishes, while the block lasts."""
    store = RedisStore(url, "c", b"key", timeout_s=1.0)
    try:
        with opened(path) as journal:
            watcher = Watcher("h1", boot, [], Roster(), AlertSinks(store, StoreHealth(), journal))
            async with running(watcher):
                yield watcher, store
    finally:
        await store.close()


def raise_one(watcher, number):
    signal = Signal(code="a.b", entity=f"gpu:{number}", severity=Severity.WARNING)
    watcher.fold(signal, f"d{number // 50}", Strategy.OBSERVE)


async def until_stream_holds(store, number):
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                found = [a.id for _, a in await store.alerts("", limit=1000)]
            except StoreUnavailable:
                found = []
            if len(found) >= number:
                return found
            await asyncio.sleep(0.01)


@pytest.fixture
def server(redis_binary, tmp_path):
    """A function that runs a Redis, always at the same address, while a block lasts."""
    (tmp_path / "redis").mkdir()
    return lambda: embedded.redis(tmp_path / "redis", binary=redis_binary)


async def test_alerts_survive_a_redis_outage_and_a_daemon_restart(tmp_path, server):
    """Alerts raised during the outage, by a daemon that ends before Redis is back."""
    path, url = tmp_path / "j", f"unix://{tmp_path}/redis/redis.sock"
    async with watcher_of(path, url, "boot1") as (watcher, _):
        for number in range(250):
            raise_one(watcher, number)
        # A second journal of the file would lock it, and the first one would go on in memory.
        async with asyncio.timeout(WITHIN_S):
            while len(await ids(watcher._journal)) < 250:  # noqa: ASYNC110 - the watcher writes it
                await asyncio.sleep(0.01)
    with server():
        async with watcher_of(path, url, "boot2") as (watcher, store):
            raise_one(watcher, 0)
            found = await until_stream_holds(store, 251)

    assert found == [*(f"h1-boot1-{n + 1}" for n in range(250)), "h1-boot2-1"]


async def test_alerts_are_published_again_to_an_emptied_redis(tmp_path, server):
    """Triggered by the wake-up at the start of a new subscription, as the daemon passes it on."""
    path, url = tmp_path / "j", f"unix://{tmp_path}/redis/redis.sock"
    async with watcher_of(path, url, "boot1") as (watcher, store):
        with server():
            for number in range(3):
                raise_one(watcher, number)
            before = await until_stream_holds(store, 3)
        with server():
            watcher.posted.ring()
            after = await until_stream_holds(store, 3)

    assert after == before == ["h1-boot1-1", "h1-boot1-2", "h1-boot1-3"]
