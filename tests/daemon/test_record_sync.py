"""From records to directives, and back to the store what it lost."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from tests import values
from tests.daemon.tasks import running
from tmd.core.values.model import READABLE_VERSION, JobState, State
from tmd.daemon.agent_socket import AgentSocket
from tmd.daemon.agents import AgentServer
from tmd.daemon.record_sync import ALL_S, SOON_S, LocalWorkers, RecordSync
from tmd.daemon.records import Records
from tmd.daemon.roster import Roster
from tmd.daemon.store_health import StoreHealth
from tmd.testing import MemoryStore
from tmd.testing.clients import worker_status

pytestmark = pytest.mark.looptime


@pytest.fixture
def data():
    return MemoryStore()


@pytest.fixture
def roster():
    return Roster()


@pytest.fixture
def reported():
    """Findings, in order."""
    return []


@pytest.fixture
def build(data, tmp_path, roster, reported):
    """A function that builds an record_sync."""

    def built(**options):
        records = Records(tmp_path)
        door = AgentSocket(path=tmp_path / "s", host="h1", uids=frozenset(), key_of=lambda _: b"")
        server = AgentServer(door, roster, records)
        client = data.client()
        given = {"poll_s": 1.0, "report": reported.append, **options}
        return RecordSync(client, StoreHealth(), LocalWorkers(records, server, roster), **given)

    return built


@pytest.fixture
def record_sync(build, roster):
    """On a host with a worker of the job."""
    roster.report(worker_status("h1/job/0.a"), now=0.0)
    return build()


async def test_a_record_lost_by_the_store_is_restored(data, record_sync, record):
    await data.client().put_job(record(revision=4, lease_epoch=8), expected=0)
    await record_sync.poll()
    data.wipe()
    await record_sync.poll()

    assert (await data.client().jobs()).records == (record(revision=4, lease_epoch=8),)


async def test_a_job_that_has_ended_can_be_deleted(data, record_sync, record):
    """Nobody has to write it back, and a new run of that name is obeyed, whatever it counts."""
    old = record(revision=50, lease_epoch=8, state=JobState.FINISHED)
    await data.client().put_job(old, expected=0)
    await record_sync.poll()
    data.wipe()
    await record_sync.poll()
    deleted = (await data.client().jobs()).records
    new = values.record("h3", "h4", revision=1, lease_epoch=9)
    await data.client().put_job(new, expected=0)
    await record_sync.poll()

    assert deleted == ()
    assert (await data.client().jobs()).records == (new,)


async def test_a_host_that_was_away_learns_that_its_job_ended_long_ago(data, build, record):
    """The job is not listed any more, and no worker of it is left on the host. It stays off the
    list, and the host forgets it then."""
    record_sync, client = build(), data.client()
    await client.put_job(record(revision=4, lease_epoch=8), expected=0)
    await record_sync.poll()
    ended = record(revision=5, lease_epoch=8, state=JobState.FINISHED)
    await client.put_job(ended, expected=4)
    await client.unlist_job(ended)
    record_sync._next_full_read = 0.0
    await record_sync.poll()
    learnt = dict(record_sync._records.jobs)
    record_sync._next_full_read = 0.0
    await record_sync.poll()

    assert learnt == {"job": ended}
    assert record_sync._records.jobs == {}
    assert (await client.jobs()).records == ()


async def test_a_leader_tells_a_worker_here_that_its_job_ended_long_ago(
    data, build, roster, record
):
    """A leader reads the list at each turn, and not only the jobs of its own workers."""
    client = data.client()
    ended = record(revision=5, lease_epoch=8, state=JobState.FAILED)
    await client.put_job(ended, expected=0)
    await client.unlist_job(ended)
    roster.report(worker_status("h1/job/0.a"), now=0.0)
    record_sync = build(leads=lambda: True)
    await record_sync.poll()
    await record_sync.poll()

    assert record_sync._records.jobs == {"job": ended}


async def test_a_record_whose_list_was_lost_is_listed_again(data, build, record):
    client, record_sync = data.client(), build()
    running = record(revision=4, lease_epoch=8)
    await client.put_job(running, expected=0)
    await record_sync.poll()
    data.unlisted.add("job")  # as if somebody had deleted the list
    record_sync._next_full_read = 0.0
    restored = []
    record_sync._store.restore_job = lambda r: _noted(restored, r)
    await record_sync.poll()

    assert restored == [running]


async def _noted(restored, record):
    restored.append(record)


async def test_a_new_run_replaces_a_job_that_was_deleted_meanwhile(data, record_sync, record):
    """It was formed before this daemon had noticed."""
    old = record(revision=50, lease_epoch=8, state=JobState.FINISHED)
    await data.client().put_job(old, expected=0)
    await record_sync.poll()
    data.wipe()
    new = values.record("h3", "h4", revision=1, lease_epoch=9)
    await data.client().put_job(new, expected=0)
    await record_sync.poll()
    await record_sync.poll()

    assert (await data.client().jobs()).records == (new,)


async def test_a_job_that_has_ended_is_restored_over_its_own_earlier_revision(
    data, record_sync, record
):
    """A fail-over of Redis may lose the last writes, and the next leader may have written since."""
    old = record(revision=50, lease_epoch=8, state=JobState.FINISHED)
    await data.client().put_job(old, expected=0)
    await record_sync.poll()
    data.wipe()
    await data.client().put_job(record(revision=49, lease_epoch=9), expected=0)
    await record_sync.poll()

    assert [r.revision for r in (await data.client().jobs()).records] == [50]


async def test_a_record_older_in_the_store_is_restored(data, record_sync, record):
    """A fail-over of Redis may lose the last writes."""
    await data.client().put_job(record(revision=4, lease_epoch=8), expected=0)
    await record_sync.poll()
    data.wipe()
    await data.client().put_job(record(revision=3, lease_epoch=8), expected=0)
    await record_sync.poll()

    assert [r.revision for r in (await data.client().jobs()).records] == [4]


async def test_a_record_of_an_older_leader_changes_nothing(data, record_sync, record):
    await data.client().put_job(record(revision=4, lease_epoch=8), expected=0)
    await record_sync.poll()
    data.wipe()
    await data.client().put_job(record(revision=9, lease_epoch=7), expected=0)
    await record_sync.poll()

    assert record_sync._records.jobs["job"].revision == 4


@pytest.mark.parametrize("revision", [5, 2], ids=["later", "lower, after lost writes"])
@pytest.mark.parametrize(
    "changes", [{"v": READABLE_VERSION + 1}, {"state": "hibernating"}], ids=["newer", "undecodable"]
)
async def test_a_record_of_a_later_version_is_neither_obeyed_nor_replaced(
    data, record_sync, record, revision, changes
):
    """The known record stays in force: the workers get no new order. It is not lost."""
    await data.client().put_job(record(revision=4, lease_epoch=8), expected=0)
    await record_sync.poll()
    later = record(revision=revision, lease_epoch=9)
    for name, value in changes.items():
        structs.force_setattr(later, name, value)
    data.wipe()
    await data.client().put_job(later, expected=0)
    before = dict(data.records)
    await record_sync.poll()

    assert record_sync._records.jobs["job"].revision == 4
    assert data.records == before


async def test_a_record_of_a_later_version_is_reported_where_it_matters(
    data, build, roster, reported, record
):
    """On hosts with a worker of the job, and by the leader; it ends when the record is read."""
    leads = []
    record_sync = build(leads=lambda: bool(leads))
    await data.client().put_job(record(v=READABLE_VERSION + 1), expected=0)
    await record_sync.poll()
    elsewhere = list(reported)
    leads.append(True)
    await record_sync.poll()
    leads.clear()
    roster.report(worker_status("h1/job/0.a"), now=0.0)
    await record_sync.poll()
    await record_sync.poll()
    await data.client().put_job(record(revision=2), expected=1)
    await record_sync.poll()

    assert elsewhere == []
    assert [(s.code, s.entity, s.state) for s in reported] == [
        ("job.record_too_new", "job:job", State.RAISED),
        ("job.record_too_new", "job:job", State.CLEARED),
    ]
    assert "update tmd on this host" in reported[0].message


async def test_a_wake_up_acts_at_once_and_a_missed_one_after_a_period(data, record_sync, record):
    async with running(record_sync):
        await asyncio.sleep(0.01)
        await data.client().put_job(record(revision=1), expected=0)
        record_sync.wake()
        await asyncio.sleep(0.01)
        at_once = record_sync._records.jobs["job"].revision
        await data.client().put_job(record(revision=2), expected=1)
        await asyncio.sleep(1.01)
        later = record_sync._records.jobs["job"].revision

    assert (at_once, later) == (1, 2)


async def test_a_job_without_workers_here_is_read_now_and_then(data, build, record):
    """Hundreds of jobs on ten thousand hosts: no host reads what concerns others each second."""
    record_sync = build()
    revisions = []
    async with running(record_sync):
        await asyncio.sleep(0.01)
        for revision in (1, 2):
            await data.client().put_job(record(revision=revision), expected=revision - 1)
            for wait_s in (2.0, ALL_S):
                await asyncio.sleep(wait_s)
                known = record_sync._records.jobs.get("job")
                revisions.append(known.revision if known else 0)

    assert revisions == [0, 1, 1, 2]


async def test_a_store_that_is_back_is_soon_compared_with_all_records(data, build, record):
    """It may have lost the record of a job that has no worker anywhere."""
    await data.client().put_job(record(revision=4, lease_epoch=8), expected=0)
    record_sync = build()
    async with running(record_sync):
        await asyncio.sleep(0.01)
        data.wipe()
        record_sync.wake_for_all()
        await asyncio.sleep(SOON_S + 1.0)

    assert (await data.client().jobs()).records == (record(revision=4, lease_epoch=8),)


async def test_a_store_that_comes_back_during_a_read_is_soon_read_again(data, build, record):
    """The read may have begun before the store lost its records."""
    await data.client().put_job(record(revision=4, lease_epoch=8), expected=0)
    record_sync = build()
    read = record_sync._store.jobs

    async def slow_read():
        found = await read()
        record_sync.wake_for_all()
        data.wipe()
        record_sync._store.jobs = read
        return found

    record_sync._store.jobs = slow_read
    async with running(record_sync):
        await asyncio.sleep(SOON_S + 1.0)

    assert (await data.client().jobs()).records == (record(revision=4, lease_epoch=8),)


async def test_the_record_of_a_job_is_read_while_its_launcher_is_connected(
    data, build, roster, record
):
    """A worker that is to be killed may hang, and so not connect to a daemon that was restarted."""
    record_sync, store = build(), data.client()
    async with running(record_sync):
        await asyncio.sleep(0.01)
        await store.put_job(record(revision=1), expected=0)
        with roster.launching("job"):
            await asyncio.sleep(0.01)
        while_connected = record_sync._records.jobs["job"].revision
        await store.put_job(record(revision=2), expected=1)
        await asyncio.sleep(2.0)
        afterwards = record_sync._records.jobs["job"].revision

    assert [while_connected, afterwards] == [1, 1]


async def test_a_new_worker_has_the_record_of_its_job_read(data, build, roster, record):
    record_sync = build()
    async with running(record_sync):
        await asyncio.sleep(0.01)
        await data.client().put_job(record(), expected=0)
        roster.report(worker_status("h1/job/0.a"), now=0.0)
        await asyncio.sleep(0.01)

    assert "job" in record_sync._records.jobs


async def test_an_outage_only_delays(data, record_sync, record):
    async with running(record_sync):
        data.fall_away()
        await asyncio.sleep(60)
        data.away = False
        await data.client().put_job(record(), expected=0)
        await asyncio.sleep(2)

    assert "job" in record_sync._records.jobs
