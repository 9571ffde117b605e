"""One contract for all stores: the real store's tests verify the fakes."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing

import pytest
from msgspec import structs
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError

from tests import values
from tmd.core.alerts.notices import Announced
from tmd.core.planning.election import Denied, Granted
from tmd.core.planning.plan_history import HISTORY
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.errors import ConfigError, Conflict, DrainRefused, StaleLease, StoreUnavailable
from tmd.core.values.model import (
    READABLE_VERSION,
    ClusterView,
    HostStatus,
    JobState,
    Mark,
    Move,
    Phase,
    PlanKind,
    Severity,
    State,
    Strategy,
)
from tmd.core.values.requests import DrainRequest, HealthyRequest, RehearsalRequest
from tmd.daemon.bus import UNLISTED_S, Topic, Wake
from tmd.daemon.redis_client import connect
from tmd.daemon.store import RedisStore
from tmd.testing.clients import worker_status

KEY = b"known to the members"


class Opened:
    """A store of a cluster of its own, and a stranger's access to its keys."""

    def __init__(self, url):
        self.name = f"t{os.urandom(4).hex()}"
        self.store = RedisStore(url, self.name, KEY)
        self._stranger = connect(url, 2.0)

    async def delete(self, key):
        await self._stranger.delete(f"{{tmd:{self.name}}}:{key}")

    async def left_ms(self):
        """Until the record and the unlisted record of ``job`` expire; -1: never, -2: no such."""
        keys = (f"{{tmd:{self.name}}}:{place}:job" for place in ("job", "ended"))
        return tuple([await self._stranger.pttl(key) for key in keys])

    async def aclose(self):
        await self.store.close()
        await self._stranger.aclose()


def alert(number):
    return values.alert(
        id=f"h1-{number}",
        severity=Severity.FATAL,
        message="ü\n",
        strategy=Strategy.ACT,
        at=1.5,
    )


async def test_an_undecodable_host_status_does_not_affect_others(store):
    """It is named, and everything else is read, also in the next snapshot."""
    later = structs.replace(worker_status("h2/job/0.a"))
    structs.force_setattr(later, "activity", "hibernating")
    for status in (HostStatus("h1", "i"), HostStatus("h2", "i", workers=(later,))):
        await store.put_host(status, ttl_s=5, wake=False)
    for _ in range(2):
        view = await store.snapshot()

        assert [h.host for h in view.hosts] == ["h1"]
        assert view.unread == ("h2",)


@pytest.mark.parametrize(
    "changes", [{"v": READABLE_VERSION + 1}, {"state": "hibernating"}], ids=["newer", "undecodable"]
)
async def test_a_record_of_a_later_version_does_not_affect_others(store, record, changes):
    """It is named and kept; everything else is read, also in the next snapshot."""
    later = record(revision=3)
    for name, value in changes.items():
        structs.force_setattr(later, name, value)
    await store.put_job(later, expected=0)
    await store.put_job(record(job="other"), expected=0)
    for _ in range(2):
        view = await store.snapshot()

        assert [r.job for r in view.jobs] == ["other"]
        assert view.unread_jobs == ("job",)
    stored = await store.jobs()
    assert ([r.job for r in stored.records], stored.unread) == (["other"], ("job",))
    assert not await store.restore_job(record(revision=2))
    with pytest.raises(Conflict):
        await store.put_job(record(), expected=0)
    assert (await store.snapshot()).unread_jobs == ("job",)


async def next_topic(wakes):
    async with asyncio.timeout(5):
        return await anext(wakes)


async def test_a_new_cluster_is_empty(store):
    assert await store.snapshot() == ClusterView()
    assert (await store.jobs()).records == ()
    assert await store.leader() == ""
    assert await store.alerts("", limit=10) == []


async def test_a_host_status_is_stored_completely(store):
    status = HostStatus(
        host="h1", incarnation="i", workers=(worker_status("h1/job/0.a"),), alerts=(alert(1),)
    )
    await store.put_host(status, ttl_s=5, wake=False)

    assert (await store.snapshot()).hosts == (status,)


async def test_a_host_is_claimed_if_no_heartbeat_of_it_is_stored(store):
    first, second = (HostStatus("h1", "i", boot=boot) for boot in ("first", "second"))

    assert await store.host_boot("h1") is None
    assert await store.claim_host(first, ttl_s=0.05)
    assert await store.host_boot("h1") == "first"
    assert not await store.claim_host(second, ttl_s=5)
    async with asyncio.timeout(5):
        while not await store.claim_host(second, ttl_s=5):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.01)
    assert (await store.host_boot("h1"), await store.host_boot("h2")) == ("second", None)


async def test_a_silent_host_disappears_and_may_return(store):
    await store.put_host(HostStatus("h1", "i"), ttl_s=0.05, wake=False)
    await store.put_host(HostStatus("h2", "i"), ttl_s=5, wake=False)
    async with asyncio.timeout(5):
        while len((await store.snapshot()).hosts) == 2:  # noqa: ASYNC110 - silence has no event
            await asyncio.sleep(0.01)
    await store.put_host(HostStatus("h1", "j"), ttl_s=5, wake=False)

    assert [h.incarnation for h in (await store.snapshot()).hosts] == ["j", "i"]


async def test_only_one_candidate_leads(clients):
    first, second = clients(), clients()
    granted = await first.acquire("a", ttl_s=5, floor=0)
    denied = await second.acquire("b", ttl_s=5, floor=0)

    assert isinstance(granted, Granted)
    assert isinstance(denied, Denied)
    assert denied.holder == "a"
    assert 0 < denied.remaining_s <= 5
    assert await second.leader() == "a"


async def test_renewal_keeps_the_epoch_and_release_lets_it_grow(store):
    first = await store.acquire("a", ttl_s=5, floor=0)
    again = await store.acquire("a", ttl_s=5, floor=0)
    await store.release("b")
    still = await store.leader()
    await store.release("a")
    after = await store.acquire("b", ttl_s=5, floor=0)

    assert first == again
    assert still == "a"
    assert isinstance(after, Granted)
    assert isinstance(first, Granted)
    assert after.epoch > first.epoch


async def test_a_new_epoch_is_above_what_the_candidate_knows(store):
    """Even after data loss and a clock that was set back."""
    known = 2**51
    answer = await store.acquire("a", ttl_s=5, floor=known)

    assert answer == Granted(known + 1)


async def test_a_renewal_is_never_below_what_the_candidate_knows(store):
    """A promoted replica may hold an old lease, under which no daemon would obey."""
    first = await store.acquire("a", ttl_s=5, floor=0)
    known = first.epoch + 7
    again = await store.acquire("a", ttl_s=5, floor=known)
    renewed = await store.acquire("a", ttl_s=5, floor=again.epoch)

    assert again.epoch > known
    assert renewed == again


async def test_a_lease_expires(store):
    first = await store.acquire("a", ttl_s=0.05, floor=0)
    async with asyncio.timeout(5):
        answer = await store.acquire("b", ttl_s=5, floor=0)
        while isinstance(answer, Denied):
            await asyncio.sleep(answer.remaining_s + 0.001)
            answer = await store.acquire("b", ttl_s=5, floor=0)

    assert answer.epoch > first.epoch


async def test_a_record_is_stored_completely(store, record):
    plain = record()
    plan = values.plan(
        plain.membership,
        kind=PlanKind.FAILOVER,
        moves=(Move(rank=0, leaver=plain.membership.members[0]),),
        reason='"quoted" \u2192 text',
        timeline=(Mark(Phase.RECOVER, 0.1), Mark(Phase.DONE, 0.2)),
        timings={"transfer": 0.05},
    )
    full = record(plan=plan, history=(plan,))
    await store.put_job(full, expected=0)

    assert (await store.snapshot()).jobs == (full,)
    assert (await store.jobs()).records == (full,)


async def test_a_write_needs_the_revision_that_was_read(store, record):
    await store.put_job(record(revision=1), expected=0)
    with pytest.raises(Conflict):
        await store.put_job(record(revision=1), expected=0)
    with pytest.raises(Conflict):
        await store.put_job(record(revision=3), expected=2)
    await store.put_job(record(revision=2), expected=1)

    assert [r.revision for r in (await store.jobs()).records] == [2]


async def test_an_older_leader_cannot_write(store, record):
    """Its lease epoch is refused even if its revision would match (I5)."""
    await store.put_job(record(revision=1, lease_epoch=2**40), expected=0)
    with pytest.raises(StaleLease):
        await store.put_job(record(revision=2, lease_epoch=2**40 - 1), expected=1)

    assert [r.lease_epoch for r in (await store.jobs()).records] == [2**40]


async def test_jobs_are_fenced_each_for_itself(store, record):
    await store.put_job(record(lease_epoch=9), expected=0)
    await store.put_job(record(job="other", lease_epoch=8), expected=0)

    assert {r.job for r in (await store.jobs()).records} == {"job", "other"}


async def test_only_a_newer_record_is_restored(store, record):
    assert await store.restore_job(record(revision=5, lease_epoch=7))
    assert not await store.restore_job(record(revision=5, lease_epoch=7))
    assert not await store.restore_job(record(revision=4, lease_epoch=9))
    with pytest.raises(StaleLease):
        await store.put_job(record(revision=6, lease_epoch=6), expected=5)
    assert await store.restore_job(record(revision=8, lease_epoch=7))

    assert [r.revision for r in (await store.jobs()).records] == [8]


async def test_a_record_that_is_listed_no_more_is_listed_again(redis_url, record):
    """Somebody deleted the list of jobs: no leader would see the job."""
    async with aclosing(Opened(redis_url)) as opened:
        await opened.store.put_job(record(revision=5), expected=0)
        await opened.delete("jobs")
        lost = await opened.store.jobs()

        assert not await opened.store.restore_job(record(revision=5))
        assert lost.records == ()
        assert [r.revision for r in (await opened.store.jobs()).records] == [5]


async def test_an_ended_job_that_is_not_listed_is_still_found_by_its_name(store, record):
    """A new run continues its revisions, and no host that was away puts an old record over it."""
    ended = record(state=JobState.FINISHED, revision=5, lease_epoch=7)
    await store.put_job(ended, expected=0)
    refused = await store.unlist_job(record(state=JobState.FINISHED, revision=4))
    there = (await store.jobs()).records
    done = await store.unlist_job(ended)
    listed = (await store.jobs()).records, (await store.snapshot()).jobs
    named = (await store.jobs_named(["job"])).records
    with pytest.raises(Conflict, match="revision is 5, expected 0"):
        await store.put_job(record(revision=1, lease_epoch=8), expected=0)
    again = record(revision=6, lease_epoch=8)
    await store.put_job(again, expected=5)

    assert (refused, there, done) == (False, (ended,), True)
    assert listed == ((), ())
    assert named == (ended,)
    assert (await store.jobs()).records == (again,)


async def test_a_host_that_was_away_learns_that_a_job_has_ended(store, record):
    """Its record is not taken for a lost one, and it finds the other one by its name."""
    ended = record(state=JobState.FINISHED, revision=5, lease_epoch=7)
    await store.put_job(ended, expected=0)
    await store.unlist_job(ended)

    assert not await store.restore_job(record(revision=4, lease_epoch=7))
    assert (await store.jobs()).records == ()
    assert (await store.jobs_named(["job"])).records == (ended,)
    assert await store.restore_job(record(revision=6, lease_epoch=7))
    assert [r.revision for r in (await store.jobs()).records] == [6]


async def test_only_an_unlisted_record_expires(redis_url, record):
    async with aclosing(Opened(redis_url)) as opened:
        left = []
        ended = record(state=JobState.FINISHED, revision=5)
        await opened.store.put_job(ended, expected=0)
        left.append(await opened.left_ms())
        await opened.store.unlist_job(ended)
        left.append(await opened.left_ms())
        await opened.store.put_job(record(revision=6), expected=5)
        left.append(await opened.left_ms())

    assert left[0] == left[2] == (-1, -2)
    assert left[1][0] == -2
    assert 0.9 * UNLISTED_S < left[1][1] / 1000 <= UNLISTED_S


async def test_operators_requests_are_stored_and_withdrawn(store):
    request = DrainRequest(host="h1", id="d1", leave=True, by="me", at=2.0)
    await store.drain(request)
    for number in (1, 2):
        await store.rehearse(RehearsalRequest(host="h2", id=f"r{number}", by="me", at=2.0))
    await store.set_paused(True)
    asked = await store.snapshot()
    was_there = await store.undrain("h1")
    was_there_again = await store.undrain("h1")
    await store.set_paused(False)

    assert (asked.drains, asked.paused) == ((request,), True)
    assert [r.id for r in asked.rehearsals] == ["r2"]
    assert (was_there, was_there_again) == (True, False)
    left = await store.snapshot()
    assert (left.drains, left.paused) == ((), False)


@pytest.mark.parametrize(
    ("standing", "wanted", "replaced"),
    [
        ({}, {"soft": True}, False),
        ({}, {"reserve": True}, False),
        ({"leave": True}, {}, False),
        ({"leave": True, "soft": True}, {"soft": True}, False),
        ({}, {}, True),
        ({}, {"leave": True}, True),
        ({"soft": True}, {}, True),
        ({"reserve": True}, {"soft": True}, False),
        ({"reserve": True}, {"reserve": True}, True),
        ({"soft": True}, {"reserve": True}, True),
    ],
)
async def test_no_drain_replaces_one_that_promises_more(store, standing, wanted, replaced):
    first, second = DrainRequest("h1", "1", by="ann", **standing), DrainRequest("h1", "2", **wanted)
    await store.drain(first)
    refused = ""
    try:
        await store.drain(second)
    except DrainRefused as error:
        refused = str(error)

    assert (await store.snapshot()).drains == (second if replaced else first,)
    assert replaced or refused.startswith("ann has drained h1 so that ")


async def test_a_drain_is_swapped_only_for_the_one_that_was_seen(store):
    """What an operator has set in the meantime stays."""
    mine, theirs = DrainRequest("h1", "m", by="slurm: disk"), DrainRequest("h1", "t", by="ann")
    found = [await store.swap_drain("h1", "m", mine), await store.swap_drain("h1", "", mine)]
    again = DrainRequest("h1", "n", by="slurm: disk")
    found += [await store.swap_drain("h1", "", again), await store.swap_drain("h1", "m", again)]
    await store.drain(theirs)
    found += [await store.swap_drain("h1", "n", None), await store.swap_drain("h1", "n", mine)]
    kept = (await store.snapshot()).drains
    found += [await store.swap_drain("h1", "t", None)]

    assert found == [False, True, False, True, False, False, True]
    assert kept == (theirs,)
    assert (await store.snapshot()).drains == ()


async def test_a_declaration_of_health_stays_until_it_is_served(store):
    first, second = (HealthyRequest("h1", f"r{n}", code="c", by="me", at=n) for n in (1.0, 2.0))
    await store.declare_healthy(second)
    await store.declare_healthy(first)
    asked = await store.healthy_requests()
    await store.healthy_served(first)
    await store.healthy_served(first)

    assert asked == (first, second)
    assert await store.healthy_requests() == (second,)


async def test_the_breaker_is_part_of_the_view(store):
    breaker = Breaker(open=True, reason="ü", at=1.5, by="me")
    await store.set_breaker(breaker)

    assert (await store.snapshot()).breaker == breaker


async def test_alerts_are_read_in_order_from_a_cursor(store):
    for number in range(5):
        await store.publish_alert(alert(number))
    first = await store.alerts("", limit=2)
    rest = await store.alerts(first[-1][0], limit=10)

    assert [a for _, a in first + rest] == [alert(n) for n in range(5)]
    assert await store.alerts(rest[-1][0], limit=10) == []


async def test_an_alert_of_a_later_version_hides_no_other(redis_url):
    """A strategy that this version does not know."""
    later = alert(1)
    structs.force_setattr(later, "strategy", "guess")
    async with aclosing(Opened(redis_url)) as opened:
        for each in (alert(0), later, alert(2)):
            await opened.store.publish_alert(each)

        assert [a.id for _, a in await opened.store.alerts("", limit=10)] == ["h1-0", "h1-2"]


async def test_a_repeated_alert_is_published_once(store):
    """An alert is repeated after a lost reply; worsening and clearing are separate alerts."""
    raised = alert(1)
    worse = structs.replace(raised, severity=Severity.FATAL, count=2)
    cleared = structs.replace(raised, state=State.CLEARED, at=9.0)
    before = await store.holds_alert(raised)
    for each in (raised, raised, worse, cleared, worse, raised):
        await store.publish_alert(each)

    assert [a for _, a in await store.alerts("", limit=10)] == [raised, worse, cleared]
    assert not before
    assert await store.holds_alert(raised)
    assert not await store.holds_alert(alert(2))


async def test_the_newest_alert_is_a_cursor(store):
    before = await store.newest_alert()
    for number in range(2):
        await store.publish_alert(alert(number))
    cursor = await store.newest_alert()
    await store.publish_alert(alert(2))

    assert before == ""
    assert [a for _, a in await store.alerts(cursor, limit=10)] == [alert(2)]


async def test_announcements_are_stored(store):
    before = await store.announced()
    await store.put_announced(Announced(cursor="1-0", alerts=("a",), migrations=("b",)))

    assert before is None
    assert await store.announced() == Announced(cursor="1-0", alerts=("a",), migrations=("b",))


async def test_the_record_of_a_large_job_is_read_with_its_whole_history(store):
    """Redis returns no value beyond a limit, and a record that is not returned stops decisions."""
    stored = values.large(4_096, plans=HISTORY)
    await store.put_job(stored, expected=0)

    assert (await store.jobs()).records == (stored,)


async def test_a_record_is_read_as_it_was_written_last(clients):
    """However often it has changed since, whoever wrote it, and however it is read."""
    readers, writers = [clients() for _ in range(3)], [clients() for _ in range(2)]
    hosts = [f"h{number}" for number in range(60)]
    for revision in range(1, 80):
        written = values.record(*hosts, revision=revision, detail=f"{revision} " * (revision % 7))
        writer = writers[revision // 20 % 2]
        await writer.jobs()
        await writer.put_job(written, expected=revision - 1)
        for every, reader in zip((1, 6, 37), readers, strict=True):
            if revision % every == 0:
                assert (await reader.jobs_named(["job"])).records == (written,)
            if revision % (2 * every) == 0:
                assert (await reader.jobs()).records == (written,)
                assert (await reader.snapshot()).jobs == (written,)


async def test_changes_wake_the_others(clients, record):
    """Each kind of change sends its wake-up; a plain heartbeat sends none."""
    store, other = clients(), clients()
    async with aclosing(store.wakes()) as wakes:
        first = await next_topic(wakes)
        await other.put_host(HostStatus("h1", "i"), ttl_s=5, wake=False)
        await other.put_host(HostStatus("h1", "i"), ttl_s=5, wake=True)
        await other.put_job(record(), expected=0)
        await other.acquire("a", ttl_s=5, floor=0)
        await other.release("a")
        await other.drain(DrainRequest("h1", "d1"))
        await other.declare_healthy(HealthyRequest("h1", "r1"))
        heard = [await next_topic(wakes) for _ in range(5)]

    assert first == Wake(Topic.ALL)
    assert heard == [
        Wake(Topic.HOST, "h1"),
        Wake(Topic.JOBS, "job"),
        Wake(Topic.LEASE),
        Wake(Topic.LEADER),
        Wake(Topic.HEALTHY, "h1"),
    ]


async def test_a_change_wakes_only_those_whom_it_concerns(clients, record):
    """Ten thousand daemons need not hear of each host and job."""
    store, leader, worker, other = clients(), clients(), clients(), clients()
    await leader.acquire("a#1", ttl_s=5, floor=0)
    async with (
        aclosing(leader.wakes("a#1")) as hers,
        aclosing(worker.wakes("b#1")) as its,
        aclosing(other.wakes("c#1")) as theirs,
    ):
        for wakes in (hers, its, theirs):
            assert await next_topic(wakes) == Wake(Topic.ALL)
        await store.put_host(HostStatus("h1", "i"), ttl_s=5, wake=True)
        await store.put_job(record(), expected=0, listeners=["b#1"])
        await store.declare_healthy(HealthyRequest("h1", "r1"))  # all hear of it
        heard = [await next_topic(wakes) for wakes in (hers, hers, its, its, theirs)]

    healthy = Wake(Topic.HEALTHY, "h1")
    assert heard == [Wake(Topic.HOST, "h1"), healthy, Wake(Topic.JOBS, "job"), healthy, healthy]


async def test_a_snapshot_may_read_some_hosts_only(clients):
    """Others are as they were read last, new ones are read, and silent ones are gone."""
    store, other = clients(), clients()
    for host in ("h1", "h2", "h3"):
        await other.put_host(HostStatus(host, "i"), ttl_s=5, wake=False)
    before = await store.snapshot([])
    for host in ("h1", "h2", "h4"):
        await other.put_host(HostStatus(host, "j"), ttl_s=5, wake=False)
    await other.put_host(HostStatus("h3", "j"), ttl_s=0.001, wake=False)
    async with asyncio.timeout(5):
        while len((after := await store.snapshot(["h2"])).hosts) != 3:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)

    def runs(view):
        return [(h.host, h.incarnation) for h in view.hosts]

    assert runs(before) == [("h1", "i"), ("h2", "i"), ("h3", "i")]
    assert runs(after) == [("h1", "i"), ("h2", "j"), ("h4", "j")]
    assert runs(await store.snapshot()) == [("h1", "j"), ("h2", "j"), ("h4", "j")]


async def test_named_records_are_read_and_read_again(store, record):
    """Unchanged ones, changed ones, those that are gone, and names of no job."""
    await store.put_job(record(), expected=0)
    await store.put_job(record(job="other"), expected=0)
    first = await store.jobs_named(["job", "none"])
    again = await store.jobs_named(["other", "job"])
    await store.put_job(record(revision=2), expected=1)
    changed = await store.jobs_named(["job"])

    assert first.records == (record(),)
    assert again.records == (record(), record(job="other"))
    assert changed.records == (record(revision=2),)
    assert (await store.jobs_named([])).records == ()


async def test_an_expired_alert_does_not_count_as_lost(redis_url):
    """A quiet host's last alert, followed by very many others: nothing is published again."""
    store = RedisStore(redis_url, f"f{os.urandom(4).hex()}", KEY, alerts_kept=3)
    try:
        for number in range(5):
            await store.publish_alert(alert(number))
        old, lost = alert(0), structs.replace(alert(9), at=4e9)

        assert await store.holds_alert(old)
        assert not await store.holds_alert(lost)
    finally:
        await store.close()


async def test_the_stream_of_alerts_is_bounded(redis_url):
    """Trimmed in whole blocks of the server, so slightly longer; the newest alerts stay."""
    store = RedisStore(redis_url, f"f{os.urandom(4).hex()}", KEY, alerts_kept=50)
    try:
        for number in range(500):
            await store.publish_alert(alert(number))
        kept = [a.id for _, a in await store.alerts("", limit=1000)]

        assert 50 <= len(kept) <= 200
        assert kept[-1] == alert(499).id
    finally:
        await store.close()


async def test_clusters_do_not_see_each_other(redis_url, record):
    one, two = RedisStore(redis_url, "one", KEY), RedisStore(redis_url, "two", KEY)
    try:
        await one.put_job(record(), expected=0)
        await one.put_host(HostStatus("h1", "i"), ttl_s=5, wake=False)

        assert await two.snapshot() == ClusterView()
    finally:
        await one.close()
        await two.close()


async def test_alerts_are_published_as_json(redis_url):
    """Other programs may subscribe to ``tmd:<cluster>:alerts``."""
    store = RedisStore(redis_url, "pub", KEY)
    listener = connect(redis_url, 2.0)
    try:
        async with listener.pubsub(ignore_subscribe_messages=True) as pubsub:
            await pubsub.subscribe("tmd:pub:alerts")
            await pubsub.get_message(timeout=2)
            await store.publish_alert(alert(1))
            message = await pubsub.get_message(timeout=2)

        assert b'"id":"h1-1"' in message["data"]
    finally:
        await store.close()
        await listener.aclose()


async def test_a_server_that_is_not_there_is_unavailable(tmp_path, record):
    store = RedisStore(f"unix://{tmp_path}/none.sock", "c", KEY, timeout_s=0.2)
    try:
        for call in (store.snapshot, store.jobs, store.leader):
            with pytest.raises(StoreUnavailable):
                await call()
        with pytest.raises(StoreUnavailable):
            await store.put_job(record(), expected=0)
        with pytest.raises(StoreUnavailable):
            await anext(store.wakes())
    finally:
        await store.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://h/0?colour=red",
        "rediss://h/0?colour=red",
        "redis+sentinel://h/s?colour=red",
        "rediss+sentinel://h/s?colour=red",
        "redis+sentinel://h/s?ssl_ca_certs=/ca",
        "redis://h/0?sentinel_password=p",
    ],
)
def test_an_unknown_option_of_an_address_is_refused(url):
    """Before it is used: a connection would fail in each loop of the daemon."""
    with pytest.raises(ConfigError, match="an option after '\\?' is unknown"):
        connect(url, 1.0)


@pytest.mark.parametrize(
    "url", ["http://x", "redis+sentinel://h", "redis+sentinel://h:x/s", "redis://h:x"]
)
def test_a_bad_url_is_a_config_error(url):
    with pytest.raises(ConfigError, match="url"):
        connect(url, 1.0)


def test_sentinels_may_have_a_login_of_their_own():
    """Signs that an address cannot hold are written as in the login of the server."""
    url = "redis+sentinel://u:p%40@h/s?sentinel_password=a%2Bb%26+c&sentinel_username=me"
    pool = connect(f"{url}&socket_keepalive=yes", 1.0).connection_pool
    assert isinstance(pool, SentinelConnectionPool)
    (sentinel,) = pool.sentinel_manager.sentinels
    own = sentinel.connection_pool.connection_kwargs

    assert pool.connection_kwargs["password"] == "p@"
    assert (own["username"], own["password"]) == ("me", "a+b&+c")
    assert (pool.connection_kwargs["username"], own["socket_keepalive"]) == ("u", True)


def test_a_sentinel_url_is_understood():
    client = connect("redis+sentinel://u:p@h1,h2:5/main/3", 1.0)
    pool = client.connection_pool

    assert isinstance(pool, SentinelConnectionPool)
    assert pool.service_name == "main"
    assert pool.connection_kwargs["db"] == 3
    assert pool.connection_kwargs["password"] == "p"


@pytest.mark.parametrize("outcome", [None, RedisConnectionError("connection lost")])
async def test_a_cancellation_that_the_client_loses_ends_the_task(outcome):
    """It arrived together with the result, or with an error."""

    async def reply():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if outcome is not None:
                raise outcome from None

    store = RedisStore("unix:///nowhere", "c", b"key")
    task = asyncio.create_task(store._ask(reply()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.close()
