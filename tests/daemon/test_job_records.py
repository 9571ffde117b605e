"""Records of jobs are sent by Redis once, and then what changes in them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
from msgspec import json, msgpack, structs
from redis.asyncio import Redis
from structlog.testing import capture_logs

from tests import values
from tests.large_jobs import LargeJob
from tmd.core.values.errors import Conflict, StaleLease, StoreUnavailable
from tmd.core.values.model import JobRecord, Membership
from tmd.daemon.codec import Codec
from tmd.daemon.job_records import Known, ReadRecord, RecordReader, Reply
from tmd.daemon.record_changes import difference
from tmd.daemon.redis_client import connect
from tmd.daemon.seal import RecordSeal
from tmd.daemon.store import RedisStore
from tmd.embedded import EmbeddedRedis

PREFIX = "{tmd:test}:"


class Scene(NamedTuple):
    """A member that reads, one that writes, and a client that does not know the secret."""

    reader: RedisStore
    writer: RedisStore
    stranger: Redis
    url: str

    async def sent(self) -> int:
        """Bytes that Redis has sent to all clients."""
        return int((await self.stranger.info("stats"))["total_net_output_bytes"])

    async def bytes_to_read(self, *names: str) -> int:
        """What it sends for one reading of the records: of all, or of those with ``names``."""
        idle = await self.sent()
        before = await self.sent()
        await (self.reader.jobs_named(names) if names else self.reader.jobs())
        return await self.sent() - before - (before - idle)

    async def write(self, *records: JobRecord) -> None:
        """The writer reads, as a leader does, and writes one after the other."""
        await self.writer.jobs()
        for record in records:
            await self.writer.put_job(record, expected=record.revision - 1)


@pytest.fixture
async def scene(redis: EmbeddedRedis) -> AsyncIterator[Scene]:
    reader, writer = (RedisStore(redis.url, "test", b"key") for _ in range(2))
    stranger = connect(redis.url, 5.0)
    async with contextlib.aclosing(stranger):
        yield Scene(reader, writer, stranger, redis.url)
        await reader.close()
        await writer.close()


def large(revision: int, note: str = "", lease_epoch: int = 1) -> JobRecord:
    """A record of a job of 500 ranks."""
    hosts = [f"host-{n}" for n in range(500)]
    return values.record(*hosts, revision=revision, lease_epoch=lease_epoch, detail=note)


WHOLE = 20_000
"""Bytes: a record has more, and its changes have less."""


async def test_an_unchanged_record_is_not_sent_again(scene: Scene) -> None:
    """What a host reads each second does not depend on the number of ranks."""
    await scene.write(large(1))
    first, again = await scene.bytes_to_read(), await scene.bytes_to_read()

    assert first > WHOLE
    assert again < 500


async def test_of_a_changed_record_the_changes_are_sent(scene: Scene) -> None:
    """Of one revision or of many, by each way to read it."""
    await scene.write(large(1))
    await scene.bytes_to_read()
    await scene.write(large(2))
    one = await scene.bytes_to_read()
    await scene.write(*(large(n, f"note {n}", lease_epoch=1 + n // 5) for n in range(3, 30)))
    many = await scene.bytes_to_read("job")
    newest = large(29, "note 29", lease_epoch=6)

    assert one < 500
    assert many < 27 * 300
    assert (await scene.reader.jobs_named(["job"])).records == (newest,)
    assert (await scene.reader.jobs()).records == (newest,)
    assert (await scene.reader.snapshot()).jobs == (newest,)


async def test_what_a_host_reads_for_a_plan_is_flat_in_ranks(scene: Scene) -> None:
    """It reads each revision when it is woken and once a second, and later all records."""
    found = {}
    for ranks in (64, 1_024, 16_384):
        job = LargeJob(ranks, name=f"job-{ranks}")
        await scene.write(job.record)
        whole = await scene.bytes_to_read(job.record.job)
        for name, plan in (("move", job.move(job.hosts[1])), ("loss", job.lose(job.hosts[3]))):
            total = 0
            for record in plan:
                await scene.write(record)
                total += sum([await scene.bytes_to_read(record.job) for _ in range(2)])
                assert (await scene.reader.jobs_named([record.job])).records == (record,)
            found[name, ranks] = total + await scene.bytes_to_read()
        assert whole > 70 * ranks

    for name in ("move", "loss"):
        few, some, many = (found[name, ranks] for ranks in (64, 1_024, 16_384))
        assert max(some, many) < 1.2 * few
        assert many < 16_000


async def test_what_was_read_of_some_jobs_is_not_sent_again_with_all(scene: Scene) -> None:
    """A host reads its own job each second, and all jobs once a minute."""
    await scene.write(large(1))
    first = await scene.bytes_to_read("job")

    assert first > WHOLE
    assert await scene.bytes_to_read() < 500


async def test_a_reader_that_was_away_for_long_gets_the_whole_record(scene: Scene) -> None:
    await scene.write(large(1))
    await scene.bytes_to_read()
    await scene.write(*(large(n, f"note {n}") for n in range(2, 50)))

    assert await scene.bytes_to_read() > WHOLE
    assert (await scene.reader.jobs()).records == (large(49, "note 49"),)


async def test_a_record_that_becomes_another_one_is_sent_whole(scene: Scene) -> None:
    """A change that is hardly shorter is of no use."""
    await scene.write(large(1))
    await scene.bytes_to_read()
    other = large(2)
    members = tuple(values.member(f"other-{n}") for n in range(500))
    other = structs.replace(other, membership=Membership(2, members))
    await scene.write(other)

    assert await scene.bytes_to_read() > WHOLE
    assert (await scene.reader.jobs()).records == (other,)


@pytest.mark.parametrize("seal", [True, False])
async def test_a_record_that_an_earlier_version_wrote_is_sent_whole(
    scene: Scene, seal: bool
) -> None:
    """It leaves the changes of others where they are, and so does the one that follows."""
    await scene.write(large(1), large(2))
    await scene.reader.jobs()
    sealed = RecordSeal(b"key").sealed("JobRecord", json.encode(large(3, "earlier")))
    beside: dict[Any, Any] = {"fence": 1, "revision": 3, "record": sealed}
    beside |= {"seal": sealed.partition(b" ")[0]} if seal else {}
    await scene.stranger.hset(PREFIX + "job:job", mapping=beside)
    between = await scene.bytes_to_read()
    assert (await scene.reader.jobs()).records == (large(3, "earlier"),)
    await scene.write(large(4))
    after = await scene.bytes_to_read()

    assert between > WHOLE
    assert (after < 500) is seal
    assert (await scene.reader.jobs()).records == (large(4),)


async def test_a_leader_that_is_late_leaves_no_change(scene: Scene) -> None:
    """Its write is refused, and so is the change that it would have stored."""
    late = RedisStore(scene.url, "test", b"key")
    try:
        await scene.write(large(1, lease_epoch=3))
        await late.jobs()
        await scene.reader.jobs()
        await scene.write(large(2, "right", lease_epoch=4))
        before = await scene.stranger.hgetall(PREFIX + "job:job")
        with pytest.raises(StaleLease):
            await late.put_job(large(2, "late", lease_epoch=3), expected=1)
        with pytest.raises(Conflict):
            await late.put_job(large(2, "late", lease_epoch=4), expected=1)

        assert await scene.stranger.hgetall(PREFIX + "job:job") == before
        assert (await scene.reader.jobs()).records == (large(2, "right", lease_epoch=4),)
    finally:
        await late.close()


async def test_a_writer_that_has_read_another_record_leaves_no_change(scene: Scene) -> None:
    """A fail-over lost the one that it has read; another leader has written it anew."""
    await scene.write(large(1), large(2, "lost"))
    await scene.reader.jobs()
    await scene.stranger.delete(PREFIX + "job:job")
    other = RedisStore(scene.url, "test", b"key")
    try:
        assert await other.restore_job(large(2, "kept"))
    finally:
        await other.close()
    await scene.writer.put_job(large(3), expected=2)

    assert await scene.stranger.hget(PREFIX + "job:job", "change:2") is None
    assert await scene.bytes_to_read() > WHOLE
    assert (await scene.reader.jobs()).records == (large(3),)


async def test_a_restored_record_need_not_be_read_again(scene: Scene) -> None:
    """Redis came back empty, and later revisions are changes again."""
    await scene.write(large(1), large(2))
    await scene.reader.jobs()
    await scene.stranger.flushdb()
    assert await scene.writer.restore_job(large(2))
    restored = await scene.bytes_to_read()
    await scene.write(large(3))
    after = await scene.bytes_to_read()

    assert max(restored, after) < 500
    assert (await scene.reader.jobs()).records == (large(3),)


async def test_a_job_that_is_formed_anew_is_not_taken_for_the_one_before(scene: Scene) -> None:
    """Someone deleted its record; the new one has the revisions of the old one."""
    await scene.write(large(1, "old"), large(2, "old"))
    await scene.reader.jobs()
    await scene.stranger.delete(PREFIX + "job:job")
    await scene.write(large(1, "new"), large(2, "new"), large(3, "new"))

    assert await scene.bytes_to_read() > WHOLE
    assert (await scene.reader.jobs()).records == (large(3, "new"),)


@pytest.mark.parametrize("all_jobs", [True, False])
async def test_a_reading_that_ends_after_a_write_does_not_hide_what_was_written(
    all_jobs: bool,
) -> None:
    """Else the next revision would have no change, and all hosts would read it whole."""
    first, second, third = (stored_of(large(n)) for n in (1, 2, 3))
    reader = RecordReader(Codec(b"key", PREFIX), Codec(b"key", PREFIX))

    async def ask(_: Known) -> Reply:
        reader.wrote("job", second)  # the reply is on its way
        return [b"job", first.revision, first.fence, first.seal, first.record]

    if all_jobs:
        _, read = await reader.all(ask, lambda reply: reply)
    else:
        read = await reader.named(["job"], ask)
    change = difference(second.record, third.record)

    assert read.records == (large(1),)
    assert reader.change_to("job", third, 2) == (second.mark, change)
    assert reader.change_to("job", third, 1) == (b"", b"")


def stored_of(record: JobRecord) -> ReadRecord:
    return ReadRecord.of(record, RecordSeal(b"key").sealed("JobRecord", json.encode(record)))


def mark_of(record: JobRecord) -> bytes:
    return stored_of(record).mark


ONE, TWO = (mark_of(large(n)) for n in (1, 2))
CHANGES = {
    "not a change": ONE + b"\n" + TWO + b"\nabc",
    "nothing": ONE + b"\n" + TWO + b"\n",
    "beyond the record": ONE + b"\n" + TWO + b"\n" + msgpack.encode([(0, 2**40)]),
    "another text": ONE + b"\n" + TWO + b"\n" + msgpack.encode([TWO[4:] + b" {}"]),
    "to itself": ONE + b"\n" + ONE + b"\n" + msgpack.encode([(0, 1000)]),
    "to another": ONE + b"\n" + TWO.replace(b"2", b"3", 1) + b"\n" + msgpack.encode([(0, 1000)]),
    "from another": TWO + b"\n" + TWO + b"\n" + msgpack.encode([(0, 1000)]),
    "no marks": b"abc",
    "empty": b"",
    "lines": b"\n" * 1000,
    "zeros": b"\0" * 1000,
    "too long": ONE + b"\n" + TWO + b"\n" + b"x" * 70_000,
}


@pytest.mark.parametrize("value", CHANGES.values(), ids=CHANGES)
async def test_a_forged_change_costs_one_whole_reading(scene: Scene, value: bytes) -> None:
    """Whatever a stranger writes there, the stored record is what is read."""
    await scene.write(large(1))
    await scene.reader.jobs()
    await scene.write(large(2))
    await scene.stranger.hset(PREFIX + "job:job", "change:1", value)

    assert await scene.bytes_to_read() > WHOLE
    assert (await scene.reader.jobs()).records == (large(2),)
    assert (await scene.reader.snapshot()).jobs == (large(2),)
    assert (await scene.reader.jobs_named(["job"])).records == (large(2),)
    assert await scene.bytes_to_read() < 500


async def test_forged_changes_of_one_job_do_not_affect_others(scene: Scene) -> None:
    """Of those the changes are read; and who reads often gets one line in the log."""
    other = [structs.replace(large(n), job="other") for n in (1, 2, 3)]
    await scene.write(large(1), other[0])
    await scene.reader.jobs()
    with capture_logs() as lines:
        for n in (2, 3):
            await scene.write(large(n), other[n - 1])
            change = mark_of(large(n - 1)) + b"\n" + mark_of(large(n)) + b"\nabc"
            await scene.stranger.hset(PREFIX + "job:job", f"change:{n - 1}", change)
            assert WHOLE < await scene.bytes_to_read() < 2 * WHOLE

    assert (await scene.reader.jobs()).records == (large(3), other[2])
    assert [line["job"] for line in lines] == ["job"]


async def test_a_forged_record_at_the_end_of_forged_changes_stops_decisions(scene: Scene) -> None:
    await scene.write(large(1))
    await scene.reader.jobs()
    forged = RecordSeal(b"a guess").sealed("JobRecord", json.encode(large(2)))
    seal = forged.partition(b" ")[0]
    fields: dict[Any, Any] = {"revision": 2, "seal": seal, "record": forged}
    change = ONE + b"\n2 1 " + seal + b"\n" + msgpack.encode([forged])
    await scene.stranger.hset(PREFIX + "job:job", mapping={**fields, "change:1": change})

    for look in (scene.reader.jobs, scene.reader.snapshot):
        with pytest.raises(StoreUnavailable, match=r"JobRecord that the secret.*delete its key"):
            await look()


async def test_another_record_with_the_same_numbers_is_read(scene: Scene) -> None:
    """A fail-over may lose a revision, which the leader then writes anew with other contents."""
    await scene.writer.put_job(large(1, "lost"), expected=0)
    assert (await scene.reader.jobs()).records == (large(1, "lost"),)
    await scene.stranger.delete(PREFIX + "job:job")
    await scene.writer.put_job(large(1, "kept"), expected=0)

    assert (await scene.reader.jobs()).records == (large(1, "kept"),)


async def test_a_record_that_is_gone_is_not_remembered(scene: Scene) -> None:
    await scene.writer.put_job(large(1), expected=0)
    assert (await scene.reader.jobs()).records == (large(1),)
    await scene.stranger.delete(PREFIX + "job:job")

    assert (await scene.reader.jobs()).records == ()
    assert await scene.writer.restore_job(large(1))
    assert (await scene.reader.jobs()).records == (large(1),)


@pytest.mark.parametrize("seal", [None, "", "0" * 64])
async def test_a_record_beside_which_another_seal_stands_is_always_read(
    scene: Scene, seal: str | None
) -> None:
    """Earlier versions leave the seal of the record before, or none; strangers write anything."""
    await scene.writer.put_job(large(1), expected=0)
    if seal is None:
        await scene.stranger.hdel(PREFIX + "job:job", "seal")
    else:
        await scene.stranger.hset(PREFIX + "job:job", "seal", seal)
    await scene.reader.jobs()

    assert await scene.bytes_to_read() > WHOLE
    assert (await scene.reader.jobs()).records == (large(1),)
