"""The leader posts to a web server that fails, hangs and recovers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from msgspec import structs

from tests.daemon.tasks import running
from tests.values import alert, plan
from tmd.core.alerts.store_health import StoreLoop
from tmd.core.planning.election import Lease
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.model import Mark, Phase
from tmd.daemon.store_health import StoreHealth
from tmd.daemon.webhook import Webhook, WebhookConfig
from tmd.schema import Secret
from tmd.testing import MemoryStore
from tmd.testing.clients import until

WITHIN_S = 20.0


class Receiver:
    """A web server with scripted answers; ``None`` hangs until the client disconnects, and an event
    until it is set."""

    def __init__(self):
        self.answers = []
        self.received = asyncio.Queue()
        self.requests = []
        self.url = ""

    async def handle(self, request):
        body = await request.json()
        self.requests.append(request.headers)
        answer = self.answers.pop(0) if self.answers else 200
        self.received.put_nowait((answer, body))
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            answer = 200
        headers = {"Location": "/elsewhere"} if 300 <= answer < 400 else {}
        return web.Response(status=answer, headers=headers)

    async def next(self):
        """The answered status and the id of the notice."""
        async with asyncio.timeout(WITHIN_S):
            answer, body = await self.received.get()
        return answer, body["tmd"]["id"]


@pytest.fixture
async def receiver():
    one = Receiver()
    app = web.Application()
    app.router.add_post("/hook/secret", one.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    one.url = f"http://127.0.0.1:{port}/hook/secret"
    yield one
    await runner.cleanup()


class Elected:
    """Leads for as long as a test wants."""

    def __init__(self, leading=True):
        self.leading = leading
        self.lease = Lease()


@asynccontextmanager
async def telling(receiver, store, elected, health=None, **changes):
    config = WebhookConfig(
        cluster="c",
        url=Secret(receiver.url),
        headers={"Authorization": Secret("Bearer x")},
        alerts=True,
        migrations=True,
        timeout_s=0.3,
        first_pause_s=0.001,
        poll_s=0.01,
    )
    health = health or StoreHealth()
    webhook = Webhook(structs.replace(config, **changes), elected, store.client(), health)
    async with running(webhook):
        yield webhook


async def begun(store):
    """Everything before the first announcement is the past and is not announced."""
    await until(lambda: store.sent_outside is not None, within_s=WITHIN_S, every_s=0.001)


async def raise_(store, *numbers, at=1000.0):
    for number in numbers:
        await store.client().publish_alert(alert(id=f"h1-{number}", at=at))


def id_of(number):
    return f"h1-{number}/raised/warning/1"


async def test_a_failing_then_recovering_receiver_gets_each_notice_once(receiver):
    """Each failure is retried, the order is kept, the past is not announced."""
    store = MemoryStore()
    await raise_(store, 0)
    receiver.answers = [500, None, 429, 200]
    async with telling(receiver, store, Elected()):
        await begun(store)
        await raise_(store, 1, 2)
        received = [await receiver.next() for _ in range(5)]

    assert received == [
        *((status, id_of(1)) for status in (500, None, 429, 200)),
        (200, id_of(2)),
    ]
    assert receiver.requests[0]["Authorization"] == "Bearer x"
    assert receiver.requests[0]["Content-Type"] == "application/json"


@pytest.mark.parametrize("refusal", [400, 404, 302])
async def test_a_refused_notice_is_not_repeated_and_delays_no_other(receiver, refusal):
    store = MemoryStore()
    receiver.answers = [refusal, 200]
    async with telling(receiver, store, Elected()):
        await begun(store)
        await raise_(store, 1, 2)
        received = [await receiver.next() for _ in range(2)]

    assert received == [(refusal, id_of(1)), (200, id_of(2))]


async def test_retries_are_bounded(receiver):
    store = MemoryStore()
    receiver.answers = [503, 503, 503, 200]
    async with telling(receiver, store, Elected(), attempts=3):
        await begun(store)
        await raise_(store, 1, 2)
        received = [await receiver.next() for _ in range(4)]

    assert received == [(503, id_of(1))] * 3 + [(200, id_of(2))]


async def test_only_the_leader_announces_and_its_successor_continues(receiver):
    store = MemoryStore()
    first, second = Elected(True), Elected(False)
    async with telling(receiver, store, first), telling(receiver, store, second):
        await begun(store)
        await raise_(store, 1)
        received = [await receiver.next()]
        await until(lambda: bool(store.sent_outside.alerts), within_s=WITHIN_S, every_s=0.001)
        first.leading, second.leading = False, True
        await raise_(store, 2)
        received.append(await receiver.next())

    assert received == [(200, id_of(1)), (200, id_of(2))]
    assert receiver.received.empty()


async def test_finished_migrations_are_announced_once(receiver, record):
    store = MemoryStore()
    client = store.client()
    before = record()
    plans = [plan(before.membership, id=f"job-{n}") for n in range(3)]
    await client.put_job(record(history=tuple(plans[:1])), expected=0)
    async with telling(receiver, store, Elected()):
        await begun(store)
        await client.put_job(record(revision=2, history=tuple(plans[:2])), expected=1)
        received = [await receiver.next()]
        await client.put_job(record(revision=3, history=tuple(plans)), expected=2)
        received.append(await receiver.next())

    assert received == [(200, "job/job-1"), (200, "job/job-2")]


@pytest.mark.parametrize("has_led", [True, False])
async def test_what_happened_while_the_store_was_away_is_announced_if_it_comes_back_empty(
    receiver, has_led
):
    """A leader that led before announces what it has not announced, another one what is not older
    than the outage: the hosts publish the rest again."""
    store, elected, health = MemoryStore(), Elected(has_led), StoreHealth()
    async with telling(receiver, store, elected, health):
        if has_led:
            await begun(store)
        await raise_(store, 1)
        received = [await receiver.next()] if has_led else []
        if has_led:
            await until(lambda: bool(store.sent_outside.alerts), within_s=WITHIN_S, every_s=0.001)
        elected.leading = False
        await health.failed(StoreLoop.HEARTBEAT, StoreUnavailable("away"))
        await asyncio.sleep(0.1)
        store.wipe()
        store.server_time = 10_000.0
        await raise_(store, 1, 2)
        await raise_(store, 3, at=9_990.0)
        elected.leading = True
        received += [await receiver.next() for _ in range(2 if has_led else 1)]

    assert received == [(200, id_of(n)) for n in ((1, 2, 3) if has_led else (3,))]
    assert receiver.received.empty()


async def test_an_emptied_store_causes_no_second_announcement(receiver):
    store = MemoryStore()
    async with telling(receiver, store, Elected()):
        await begun(store)
        await raise_(store, 1)
        received = [await receiver.next()]
        await until(lambda: bool(store.sent_outside.alerts), within_s=WITHIN_S, every_s=0.001)
        store.wipe()
        await raise_(store, 1, 2)
        received.append(await receiver.next())

    assert received == [(200, id_of(1)), (200, id_of(2))]


@pytest.mark.parametrize("away", [True, False], ids=["restarted", "flushed"])
async def test_an_emptied_store_causes_no_announcement_of_the_past(receiver, away):
    """The hosts publish the alerts of a week again, more than a leader remembers by their ids."""
    store, elected, health = MemoryStore(), Elected(), StoreHealth()
    store.server_time, store.alerts_before_wipe = 10_000.0, 9_000_000
    await raise_(store, 1, 2, at=100.0)
    async with telling(receiver, store, elected, health):
        await begun(store)
        if away:
            elected.leading = False
            await health.failed(StoreLoop.HEARTBEAT, StoreUnavailable("away"))
        store.wipe()
        await raise_(store, 1, 2, at=100.0)
        await raise_(store, 3, at=9_995.0)
        elected.leading = True
        received = await receiver.next()

    assert received == (200, id_of(3))
    assert receiver.received.empty()


async def test_migrations_of_before_an_outage_are_no_news_later(receiver, record):
    """The records come back after the first look of a new leader."""
    store, elected, health = MemoryStore(), Elected(False), StoreHealth()
    store.server_time = 10_000.0
    old = plan(record().membership, id="job-1", timeline=(Mark(Phase.DONE, 100.0),))
    async with telling(receiver, store, elected, health):
        await health.failed(StoreLoop.HEARTBEAT, StoreUnavailable("away"))
        elected.leading = True
        await begun(store)
        await store.client().put_job(record(history=(old,)), expected=0)
        await until(lambda: bool(store.sent_outside.migrations), within_s=WITHIN_S, every_s=0.001)

    assert store.sent_outside.migrations == ("job/job-1",)
    assert receiver.received.empty()


async def test_a_former_leader_keeps_what_its_successor_has_stored(receiver):
    """It has lost the lease during a POST."""
    store, answered = MemoryStore(), asyncio.Event()
    first, second = Elected(True), Elected(False)
    receiver.answers = [answered]
    async with (
        telling(receiver, store, first, timeout_s=WITHIN_S) as former,
        telling(receiver, store, second),
    ):
        await begun(store)
        await raise_(store, 1)
        received = [(await receiver.next())[1]]
        first.leading, second.leading = False, True
        await raise_(store, 2)
        received += [(await receiver.next())[1] for _ in range(2)]
        await until(lambda: len(store.sent_outside.alerts) == 2, within_s=WITHIN_S, every_s=0.001)
        answered.set()
        await until(lambda: former._announced is None, within_s=WITHIN_S, every_s=0.001)

    assert received == [id_of(1), id_of(1), id_of(2)]
    assert len(store.sent_outside.alerts) == 2


async def test_a_leader_that_led_before_keeps_what_another_one_has_stored(receiver):
    """It has lost and regained the lease during a POST, and repeats nothing that follows."""
    store, answered = MemoryStore(), asyncio.Event()
    first, second = Elected(True), Elected(False)
    receiver.answers = [answered]
    async with (
        telling(receiver, store, first, timeout_s=WITHIN_S),
        telling(receiver, store, second),
    ):
        await begun(store)
        await raise_(store, 1, 2)
        received = [(await receiver.next())[1]]
        first.leading, second.leading = False, True
        received += [(await receiver.next())[1] for _ in range(2)]
        await until(lambda: len(store.sent_outside.alerts) == 2, within_s=WITHIN_S, every_s=0.001)
        first.leading, second.leading, first.lease = True, False, Lease(epoch=2)
        answered.set()
        await raise_(store, 3)
        received.append((await receiver.next())[1])

    assert received == [id_of(1), id_of(1), id_of(2), id_of(3)]
    assert receiver.received.empty()


async def test_a_notice_is_not_repeated_because_the_store_was_away_after_it(receiver):
    store, answered = MemoryStore(), asyncio.Event()
    health = StoreHealth()
    receiver.answers = [answered]
    async with telling(receiver, store, Elected(), health, timeout_s=WITHIN_S):
        await begun(store)
        await raise_(store, 1)
        received = [(await receiver.next())[1]]
        store.fall_away()
        answered.set()
        await until(lambda: bool(health.state.failing), within_s=WITHIN_S, every_s=0.001)
        store.away = False
        await raise_(store, 2)
        received.append((await receiver.next())[1])

    assert received == [id_of(1), id_of(2)]
