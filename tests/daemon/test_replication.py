"""Plans and leases wait for a replica, where there is one; with real servers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from redis.exceptions import ResponseError

from tests.daemon.redises import plain
from tests.values import record
from tmd.core.planning.election import Granted
from tmd.core.values.errors import StoreUnavailable
from tmd.daemon.redis_client import connect
from tmd.daemon.store import RedisStore

WITHIN_S = 20.0
RECORD = record("h1", revision=1, lease_epoch=5)


@pytest.fixture
def pair(redis_binary: str, tmp_path: Path) -> Iterator[tuple[int, int, subprocess.Popen[bytes]]]:
    """The ports of a server and of its replica, and the process of the replica."""
    options = ("--repl-diskless-sync-delay", "0", "--repl-timeout", "60")
    with plain(redis_binary, tmp_path / "primary", *options) as (primary, _):
        of = ("--replicaof", f"127.0.0.1 {primary}")
        with plain(redis_binary, tmp_path / "replica", *of) as (replica, process):
            yield primary, replica, process
            process.send_signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def opened(port: int, wait_s: float = WITHIN_S) -> AsyncIterator[RedisStore]:
    """``wait_s``: for a replica."""
    url = f"redis://127.0.0.1:{port}/0"
    store = RedisStore(url, "c", b"key", timeout_s=2 * WITHIN_S, replica_wait_s=wait_s)
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def client(port: int) -> AsyncIterator[Any]:
    found = connect(f"redis://127.0.0.1:{port}/0", 2.0)
    try:
        yield found
    finally:
        await found.aclose()


async def until(condition: Any) -> None:
    """Redis has no event for it, so it is asked again."""
    async with asyncio.timeout(WITHIN_S):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def online(primary: int) -> None:
    """Return once the replica has taken over a write."""
    async with client(primary) as asked:

        async def has_replica() -> bool:
            await asked.set("written", "x")
            return bool(await asked.execute_command("WAIT", 1, 1000))

        await until(has_replica)


async def stopped(process: subprocess.Popen[bytes]) -> None:
    """Stop ``process``, and return once none of its threads runs."""
    process.send_signal(signal.SIGSTOP)
    state = Path(f"/proc/{process.pid}/stat")

    async def stands() -> bool:
        return _state(state) == "T"

    await until(stands)


def _state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]


async def waits(
    store: RedisStore, asked: Any, process: subprocess.Popen[bytes], revision: int
) -> bool:
    """Whether a write goes on only once the replica, which stands still meanwhile, has it."""
    await stopped(process)
    record = structs.replace(RECORD, revision=revision)
    async with asyncio.TaskGroup() as group:
        writing = group.create_task(store.put_job(record, expected=revision - 1))

        async def written() -> bool:
            return bool(await asked.hget("{tmd:c}:job:job", "revision") == b"%d" % revision)

        await until(written)
        waited = not writing.done()
        process.send_signal(signal.SIGCONT)
    return waited


async def test_a_plan_is_written_once_a_replica_has_it(
    pair: tuple[int, int, subprocess.Popen[bytes]],
) -> None:
    """While the replica stands still, so does the write, though the server has it."""
    primary, replica, process = pair
    await online(primary)
    async with opened(primary) as store, client(primary) as asked:
        await store.put_job(RECORD, expected=0)
        waited = await waits(store, asked, process, 2)
    async with opened(replica) as other:
        (found,) = (await other.jobs()).records

    assert waited
    assert found.revision == 2
    assert store.unreplicated == ""


async def test_a_replica_that_lags_delays_a_write_for_a_bounded_time_and_is_reported(
    pair: tuple[int, int, subprocess.Popen[bytes]],
) -> None:
    """The write counts, and the report ends with the first one that the replica has again."""
    primary, _, process = pair
    await online(primary)
    async with opened(primary, wait_s=2.0) as store:
        first = await store.acquire("h1", ttl_s=30, floor=0)
        before = store.unreplicated
        await stopped(process)
        lagging = await store.acquire("h1", ttl_s=30, floor=0)
        during = store.unreplicated
        process.send_signal(signal.SIGCONT)

        async def over() -> bool:
            await store.acquire("h1", ttl_s=30, floor=0)
            return store.unreplicated == ""

        await until(over)

    assert isinstance(first, Granted)
    assert lagging == first
    assert (before, during) == ("", "no replica had the latest write within 2000 ms")


async def test_without_a_replica_nothing_waits_and_nothing_is_reported(
    redis_binary: str, tmp_path: Path
) -> None:
    with plain(redis_binary, tmp_path / "alone") as (port, _):
        async with opened(port, wait_s=WITHIN_S) as store:
            async with asyncio.timeout(WITHIN_S):
                for revision in range(1, 50):
                    written = structs.replace(RECORD, revision=revision)
                    await store.put_job(written, expected=revision - 1)

            assert store.unreplicated == ""


async def test_a_replica_is_found_while_others_write(
    pair: tuple[int, int, subprocess.Popen[bytes]],
) -> None:
    """Under traffic no replica has acknowledged yet what the server wrote last."""
    primary, _, process = pair
    await online(primary)
    async with opened(primary) as store, client(primary) as asked:
        await stopped(process)
        await asked.set("busy", "x")
        await store.snapshot()
        first = await waits(store, asked, process, 1)
        second = await waits(store, asked, process, 2)

    assert (first, second) == (True, True)


async def test_a_lease_counts_though_redis_does_not_let_it_wait(
    pair: tuple[int, int, subprocess.Popen[bytes]],
) -> None:
    """The script has run by then. That nothing waits is reported."""
    primary, _, _ = pair
    await online(primary)
    async with opened(primary) as store, client(primary) as admin:
        first = await store.acquire("h1", ttl_s=30, floor=0)
        await admin.execute_command("ACL", "SETUSER", "default", "-wait")
        second = await store.acquire("h1", ttl_s=30, floor=0)

    assert isinstance(first, Granted)
    assert second == first
    assert store.unreplicated.startswith("Redis does not allow this user to run WAIT")
    assert "add '+wait' to the rights of the user in [redis] url" in store.unreplicated


async def test_a_server_that_is_busy_once_is_still_waited_for(
    pair: tuple[int, int, subprocess.Popen[bytes]],
) -> None:
    """Only a refusal for good ends the waiting."""
    primary, _, process = pair
    await online(primary)
    async with opened(primary) as store, client(primary) as admin:
        await admin.config_set("busy-reply-threshold", 1)
        script = "while redis.call('EXISTS', 'end') == 0 do end"
        looping = asyncio.create_task(admin.eval(script, 0))
        async with client(primary) as other:

            async def busy() -> bool:
                try:
                    await other.ping()
                except ResponseError as error:
                    return "busy" in str(error).lower()
                return False

            await until(busy)
            with pytest.raises(StoreUnavailable, match="busy"):
                await store.acquire("h1", ttl_s=30, floor=0)
            await other.script_kill()
        with pytest.raises(ResponseError):
            await looping
        await store.acquire("h1", ttl_s=30, floor=0)
        await stopped(process)
        writing = asyncio.create_task(store.acquire("h1", ttl_s=30, floor=0))
        async with client(primary) as asked:

            async def blocked() -> bool:
                return (await asked.info("clients"))["blocked_clients"] == 1

            await until(blocked)
        process.send_signal(signal.SIGCONT)

        assert isinstance(await writing, Granted)


async def test_a_replica_that_has_caught_up_ends_the_report_without_a_write(
    pair: tuple[int, int, subprocess.Popen[bytes]],
) -> None:
    """A leader looks for it between its decisions."""
    primary, _, process = pair
    await online(primary)
    async with opened(primary, wait_s=2.0) as store:
        await store.acquire("h1", ttl_s=30, floor=0)
        await stopped(process)
        await store.acquire("h1", ttl_s=30, floor=0)
        during = store.unreplicated
        process.send_signal(signal.SIGCONT)

        async def over() -> bool:
            await store.look_for_replica()
            return store.unreplicated == ""

        await until(over)

    assert during
