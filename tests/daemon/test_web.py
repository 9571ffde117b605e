"""HTTP: what it shows, which requests it accepts, and its limits."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager, suppress

import aiohttp
import msgspec
import pytest
import structlog
from msgspec import structs

from tests.daemon.tasks import running
from tests.values import alert
from tmd.config import Log
from tmd.core.alerts import store_health
from tmd.core.planning.election import Lease
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.errors import ConfigError
from tmd.core.values.model import Activity, HostStatus, Severity, State
from tmd.daemon import logs
from tmd.daemon.bus import state_of
from tmd.daemon.counters import AlertCounter, JobCounter
from tmd.daemon.logs import BURST
from tmd.daemon.web.connections import ConnectionLimits, Connections
from tmd.daemon.web.page_samples import History
from tmd.daemon.web.parts import Local, WebParts
from tmd.daemon.web.reading import PAGE_LIMIT
from tmd.daemon.web.server import MOST_READS, Web
from tmd.daemon.web.stream import MOST_STREAMS
from tmd.schema import Secret
from tmd.testing import MemoryStore
from tmd.testing.clients import until, worker_status

WITHIN_S = 20.0
TOKEN = "0123456789abcdef"
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}

ALERT = alert(id="h1-0", severity=Severity.DEGRADED, message="line\nbreak <b>")


class Served:
    """A daemon's HTTP server over a store in memory, and a client."""

    def __init__(self, store):
        self.store = store
        self.store_state = store_health.StoreState(written=True)

    def connect(self, parts, client, port, task):
        self.parts = parts
        self.client = client
        self.port = port
        self._task = task

    async def stop(self):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def get(self, path, **options):
        async with self.client.get(path, **options) as response:
            return response.status, await response.json()

    async def post(self, path, body=None, **options):
        options.setdefault("headers", AUTHORIZED)
        async with self.client.post(path, json=body or {}, **options) as response:
            return response.status, await response.json()


@asynccontextmanager
async def serving(
    store=None, token=TOKEN, serving_trainers=True, patience=None, history=None, at=("c", "h1")
):
    store = store or MemoryStore()
    served = Served(store)

    def local():
        return Local(
            cluster=at[0],
            status=HostStatus(at[1], "i"),
            serving=serving_trainers,
            leading=False,
            lease=Lease(),
            alerts=AlertCounter(),
            jobs=JobCounter(),
            view=None,
            store=served.store_state,
        )

    parts = WebParts(
        store.client(),
        local,
        None if token is None else Secret(token),
        frozenset({"node7"}),
        history or History(),
        look_s=0.1,
    )
    web = Web(("127.0.0.1", 0), parts, patience)
    async with running(web) as (task,):
        async with asyncio.timeout(WITHIN_S):
            await web.listening.wait()
        async with aiohttp.ClientSession(
            f"http://127.0.0.1:{web.port}",
            timeout=aiohttp.ClientTimeout(total=WITHIN_S),
            connector=aiohttp.TCPConnector(limit=0),
        ) as client:
            served.connect(parts, client, web.port, task)
            yield served


@pytest.fixture
async def served():
    async with serving() as one:
        yield one


async def fill(store, record):
    await speak(store)
    await store.client().put_job(record, expected=0)


async def speak(store, **more):
    """Two workers train; ``more``: additional fields of both."""
    client = store.client()
    for number in (1, 2):
        worker = structs.replace(
            worker_status(f"h{number}/job/0.a"),
            activity=Activity.TRAINING,
            step=42,
            step_seconds=0.25,
            **more,
        )
        alerts = (ALERT,) if number == 1 else ()
        status = HostStatus(f"h{number}", "i", workers=(worker,), alerts=alerts)
        await client.put_host(status, ttl_s=1e9, wake=False)


# --- reading --------------------------------------------------------------------------------------


async def test_health_and_readiness_are_reported(served):
    healthy = await served.get("/healthz")
    ready = await served.get("/readyz")
    served.store_state, _ = store_health.failed(
        served.store_state, store_health.StoreLoop.HEARTBEAT, "out of memory", 1.0
    )
    still_healthy = await served.get("/healthz")
    unready = await served.get("/readyz")
    served.store_state = store_health.StoreState()
    not_yet = await served.get("/readyz")
    async with serving(serving_trainers=False) as deaf:
        not_listening = await deaf.get("/readyz")

    assert healthy == still_healthy == (200, {"ok": True})
    assert ready == (200, {"ready": True, "problems": []})
    assert unready == (503, {"ready": False, "problems": ["out of memory"]})
    assert not_yet[0] == 503
    assert not_listening[0] == 503


async def test_the_state_is_that_of_the_command_line(served, record):
    await fill(served.store, record())
    status, shown = await served.get("/v1/state")

    assert status == 200
    assert shown == json.loads(msgspec.json.encode(await state_of(served.store.client())))
    assert [h["host"] for h in shown["hosts"]] == ["h1", "h2"]


async def test_events_come_in_pages(served):
    for number in range(5):
        await served.store.client().publish_alert(structs.replace(ALERT, id=f"h1-{number}"))
    _, first = await served.get("/v1/events?limit=2")
    _, rest = await served.get(f"/v1/events?after={first['next']}")
    _, end = await served.get(f"/v1/events?after={rest['next']}")

    status, _ = await served.get(f"/v1/events?limit={PAGE_LIMIT + 1}")

    assert status == 400
    ids = [e["alert"]["id"] for page in (first, rest) for e in page["events"]]
    assert ids == [f"h1-{n}" for n in range(5)]
    assert end == {"events": [], "next": rest["next"]}


@pytest.mark.parametrize(
    ("accept", "answered"),
    [("", "text/plain"), ("application/openmetrics-text", "application/openmetrics-text")],
)
async def test_metrics_need_no_redis_and_come_in_both_formats(served, accept, answered):
    served.store.fall_away()
    async with served.client.get("/metrics", headers={"Accept": accept}) as response:
        text = await response.text()

    assert (response.status, response.content_type) == (200, answered)
    assert "tmd_store_reachable 1.0" in text
    assert text.endswith("# EOF\n") == bool(accept)


async def test_the_page_loads_and_runs_only_what_this_daemon_serves(served):
    """No file of it names another place, none has a script or style within it."""
    async with served.client.get("/") as response:
        index = await response.text()
        policy = response.headers["Content-Security-Policy"]
    paths = re.findall(r'(?:src|href)="(static/[^"]+)"', index)
    for path in paths:
        async with served.client.get(f"/{path}") as response:
            assert response.status == 200, path

    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy
    assert len(paths) >= 4
    assert not re.search(r"<style|<script>|style=|\son\w+=", index)
    assert not re.search(r'(?:src|href)="(?!static/|#)', index)


async def test_a_file_of_the_page_is_sent_once_and_nothing_else_is_served(served):
    path = "/static/js/app.js"
    async with served.client.get(path) as response:
        tag, kind = response.headers["ETag"], response.content_type
    async with served.client.get(path, headers={"If-None-Match": tag}) as again:
        known = again.status
    outside = [
        (await served.get(f"/static/{name}"))[0]
        for name in ("js", "nothing.js", "js/..%2f..%2fserver.py", "%2fetc%2fpasswd")
    ]

    assert (kind, known) == ("text/javascript", 304)
    assert outside == [404] * 4


# --- the stream -----------------------------------------------------------------------------------


@asynccontextmanager
async def listening(served, after="", headers=None, path="/v1/stream"):
    """A function that returns the next event of a kind: (id, data)."""
    async with served.client.get(
        path, params={"after": after} if after else {}, headers=headers or {}
    ) as response:
        assert response.status == 200

        async def next_event(kind):
            async with asyncio.timeout(WITHIN_S):
                while True:
                    block = (await response.content.readuntil(b"\n\n")).decode()
                    lines = [line for line in block.splitlines() if line and line[0] != ":"]
                    fields = dict(line.split(": ", 1) for line in lines)
                    if fields.get("event") == kind:
                        return fields.get("id", ""), json.loads(fields["data"])

        yield next_event


async def test_a_stream_sends_the_state_and_every_alert(served, record):
    client = served.store.client()
    await client.publish_alert(ALERT)
    async with listening(served) as next_event:
        _, empty = await next_event("state")
        await fill(served.store, record())
        await client.publish_alert(structs.replace(ALERT, id="h1-1"))
        _, alert = await next_event("alert")
        _, full = await next_event("state")

    assert (empty["jobs"], len(full["jobs"])) == ([], 1)
    assert (alert["id"], alert["message"]) == ("h1-1", ALERT.message)


async def test_a_stream_begins_with_its_cursor(served):
    """A client that is cut off before the first alert reconnects with it, and misses none."""
    await served.store.client().publish_alert(ALERT)
    async with served.client.get("/v1/stream") as response:
        first = (await response.content.readuntil(b"\n\n")).decode()
    newest = await served.store.client().newest_alert()

    assert first == f"id: {newest}\n\n"


async def test_a_client_that_reconnects_misses_nothing(served):
    """As browsers do: with the id of the last event received. Also across a store outage."""
    client = served.store.client()
    async with listening(served) as next_event:
        await next_event("state")
        await client.publish_alert(structs.replace(ALERT, id="h1-1"))
        cursor, _ = await next_event("alert")
    for number in (2, 3):
        await client.publish_alert(structs.replace(ALERT, id=f"h1-{number}"))
    async with listening(served, headers={"Last-Event-ID": cursor}) as next_event:
        heard = [(await next_event("alert"))[1]["id"] for _ in range(2)]
        served.store.fall_away()
        await next_event("away")
        served.store.away = False
        await client.publish_alert(structs.replace(ALERT, id="h1-4"))
        heard.append((await next_event("alert"))[1]["id"])

    assert heard == ["h1-2", "h1-3", "h1-4"]


async def test_streams_are_limited_and_end_with_the_daemon():
    async with serving() as served:
        responses = [await served.client.get("/v1/stream") for _ in range(MOST_STREAMS)]
        status, reply = await served.get("/v1/stream")
        still = await served.get("/healthz")
        await asyncio.wait_for(served.stop(), WITHIN_S)
        for response in responses:
            with suppress(aiohttp.ClientError, ConnectionError):
                await asyncio.wait_for(response.read(), WITHIN_S)

    assert (status, reply["error"]["code"]) == (503, "too_many_streams")
    assert still[0] == 200


# --- changing -------------------------------------------------------------------------------------


async def test_operators_requests_are_those_of_the_command_line(served, record):
    await fill(served.store, record())
    drained = await served.post("/v1/drain", {"host": "h2", "leave": True, "by": "me"})
    paused = await served.post("/v1/pause")
    view = await served.store.client().snapshot()
    undrained = await served.post("/v1/undrain", {"host": "h2"})
    resumed = await served.post("/v1/resume")
    after = await served.store.client().snapshot()

    assert [s for s, _ in (drained, paused, undrained, resumed)] == [202, 200, 200, 200]
    assert [(d.host, d.leave, d.by, d.id) for d in view.drains] == [
        ("h2", True, "me", drained[1]["drain"]["id"])
    ]
    assert (view.paused, after.paused, after.drains) == (True, False, ())


async def test_resuming_closes_the_breaker_as_the_command_line_does(served):
    """The banner of the page offers it, and the alert of the breaker is cleared."""
    client = served.store.client()
    await client.set_breaker(Breaker(open=True, reason="too much", at=1.0))
    status, _ = await served.post("/v1/resume")
    breaker = (await client.snapshot()).breaker
    ((_, cleared),) = await client.alerts("", limit=10)

    assert status == 200
    assert (breaker.open, breaker.reason, breaker.by) == (False, "too much", "http 127.0.0.1")
    assert (cleared.code, cleared.host, cleared.state) == ("breaker.open", "h1", State.CLEARED)


@pytest.mark.parametrize("verb", ["drain", "undrain", "pause", "resume"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer fedcba9876543210"}, 401),
        ({**AUTHORIZED, "Host": "evil.example"}, 403),
        ({**AUTHORIZED, "Origin": "https://evil.example"}, 403),
        ({**AUTHORIZED, "Content-Type": "text/plain"}, 415),
    ],
)
async def test_no_change_without_token_or_from_elsewhere(served, record, verb, headers, status):
    await fill(served.store, record())
    await served.store.client().set_paused(verb == "resume")
    before = await served.store.client().snapshot()
    answered, reply = await served.post(f"/v1/{verb}", {"host": "h2"}, headers=headers)

    assert answered == status
    assert reply["error"]["message"]
    assert await served.store.client().snapshot() == before


async def test_without_a_token_file_nothing_can_be_changed():
    async with serving(token=None) as served:
        status, reply = await served.post("/v1/pause", headers={"Authorization": "Bearer "})
        paused = (await served.store.client().snapshot()).paused

    assert (status, reply["error"]["code"]) == (403, "no_token_configured")
    assert "token_file" in reply["error"]["message"]
    assert not paused


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"host": "h9"}, 404, "unknown_host"),
        ({}, 400, "bad_body"),
        ({"host": "h2", "level": 1}, 400, "bad_body"),
        ({"host": 5}, 400, "bad_body"),
        ({"host": "x" * 20_000}, 413, "request_entity_too_large"),
    ],
)
async def test_a_wrong_body_is_a_clear_error(served, record, body, status, code):
    await fill(served.store, record())
    answered, reply = await served.post("/v1/drain", body)

    assert (answered, reply["error"]["code"]) == (status, code)
    assert (await served.store.client().snapshot()).drains == ()


async def test_a_drain_that_promises_less_is_refused(served, record):
    await fill(served.store, record())
    first, _ = await served.post("/v1/drain", {"host": "h2", "by": "ann"})
    status, reply = await served.post("/v1/drain", {"host": "h2", "soft": True})

    assert first == 202
    assert (status, reply["error"]["code"]) == (409, "drained")
    assert "ann has drained h2" in reply["error"]["message"]
    assert [d.soft for d in (await served.store.client().snapshot()).drains] == [False]


async def test_a_host_that_is_switched_off_is_drained(served, record):
    await fill(served.store, record())
    status, _ = await served.post("/v1/drain", {"host": "h9", "absent": True})

    assert status == 202
    assert [d.host for d in (await served.store.client().snapshot()).drains] == ["h9"]


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/nothing", 404, "not_found"),
        ("/v1/drain", 405, "method_not_allowed"),
        ("/v1/events?after=x", 400, "bad_cursor"),
        ("/v1/events?limit=0", 400, "bad_limit"),
        ("/v1/events?limit=100000", 400, "bad_limit"),
        ("/v1/events?limit=00000000100000000", 400, "bad_limit"),
        ("/v1/stream?after=%0a", 400, "bad_cursor"),
    ],
)
async def test_errors_are_json(served, path, status, code):
    answered, reply = await served.get(path)

    assert (answered, reply["error"]["code"]) == (status, code)


async def test_an_unavailable_store_is_reported(served):
    served.store.fall_away()

    for answered, reply in (await served.get("/v1/state"), await served.post("/v1/pause")):
        assert (answered, reply["error"]["code"]) == (503, "store_unavailable")


# --- bounds ---------------------------------------------------------------------------------------


async def knock(served, reply=b""):
    """A connection on which ``said`` is sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(reply)
    await writer.drain()
    return reader, writer


async def ended(reader):
    """Wait until the server has closed the connection."""
    with suppress(ConnectionError):
        async with asyncio.timeout(WITHIN_S):
            while await reader.read(1 << 16):
                pass
    return True


HALF = b"GET /v1/state HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize("reply", [b"", HALF], ids=["silent", "half"])
async def test_whoever_keeps_connections_open_makes_room(served, reply):
    """The one that has waited longest is dropped; the others stay."""
    most = ConnectionLimits().connections
    opened = [await knock(served, reply) for _ in range(most)]
    try:
        healthy = await served.get("/healthz")
        dropped = await ended(opened[0][0])
        _, last = opened[-1]
        last.write(b"\r\n" if reply else HALF + b"\r\n")
        async with asyncio.timeout(WITHIN_S):
            answer = await opened[-1][0].readline()
    finally:
        for _, writer in opened:
            writer.close()

    assert healthy == (200, {"ok": True})
    assert dropped
    assert answer == b"HTTP/1.1 200 OK\r\n"


async def test_a_flood_of_every_kind_does_not_keep_a_probe_out(served):
    """Streams, reads that Redis does not answer, and half-open connections, all at once."""
    store = served.store
    store.answers.clear()
    request = b"GET /v1/%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
    opened = []
    try:
        for number in range(MOST_READS):
            opened.append(await knock(served, request % b"state"))
            await until(lambda: store.waiting > number, within_s=WITHIN_S)  # noqa: B023
        opened += [await knock(served, request % b"stream") for _ in range(2 * MOST_STREAMS)]
        opened += [await knock(served, HALF) for _ in range(2 * ConnectionLimits().connections)]
        one_more = await served.get("/v1/state")
        healthy = await served.get("/healthz")
        store.answers.set()
        async with asyncio.timeout(WITHIN_S):
            first = await opened[0][0].readline()
    finally:
        store.answers.set()
        for _, writer in opened:
            writer.close()

    assert (one_more[0], one_more[1]["error"]["code"]) == (503, "too_busy")
    assert healthy == (200, {"ok": True})
    assert first == b"HTTP/1.1 200 OK\r\n"


async def test_a_client_that_does_not_read_makes_room():
    """While all requests are being answered: files of the page, say, which are not counted."""
    paused = []

    class Answering(asyncio.Protocol):
        def connection_made(self, transport):
            self._answer = connections.answering(self)
            self._answer.__enter__()
            transport.write(bytes(1 << 24))

        def pause_writing(self):
            paused.append(self)

    connections = Connections(Answering, ConnectionLimits(connections=2))
    server = await asyncio.get_running_loop().create_server(connections.welcome, "127.0.0.1", 0)
    port, opened = server.sockets[0].getsockname()[1], []
    try:
        for number in (1, 2, 3):
            opened.append(await asyncio.open_connection("127.0.0.1", port))
            await until(lambda: len(paused) == number, within_s=WITHIN_S)  # noqa: B023
        dropped = await ended(opened[0][0])
        left = [handler in connections._answered for handler in paused]
    finally:
        for _, writer in opened:
            writer.transport.abort()
        server.close()

    assert dropped
    assert left == [False, True, True]


@pytest.mark.parametrize(
    ("reply", "patience"),
    [
        (b"", ConnectionLimits(first_s=0.05)),
        (HALF, ConnectionLimits(first_s=0.05)),
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n" + HALF, ConnectionLimits(next_s=0.05)),
        (
            b"POST /v1/pause HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
            + TOKEN.encode()
            + b"\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{",
            ConnectionLimits(answer_s=0.05),
        ),
    ],
    ids=["silent", "half", "half after a whole one", "half a body"],
)
async def test_a_client_that_does_not_go_on_is_dropped(reply, patience):
    async with serving(patience=patience) as served:
        reader, writer = await knock(served, reply)
        dropped = await ended(reader)
        writer.close()
        healthy = await served.get("/healthz")

    assert dropped
    assert healthy[0] == 200


# --- names ----------------------------------------------------------------------------------------


ROUTES = ("/", "/readyz", "/metrics", "/v1/state", "/v1/events", "/v1/stream", "/nothing")


@pytest.mark.parametrize("path", ROUTES)
async def test_a_page_whose_name_leads_here_reads_nothing(served, path):
    """DNS rebinding: the browser sends the host name of the page."""
    async with served.client.get(path, headers={"Host": "evil.example:7471"}) as response:
        reply = await response.json()

    assert (response.status, reply["error"]["code"]) == (403, "wrong_host")
    assert "[http] names" in reply["error"]["message"]


@pytest.mark.parametrize(
    "host", ["localhost", "node7:80", "NODE7.", "10.1.2.3:7471", "[fe80::1]:1"]
)
async def test_the_daemons_names_and_addresses_are_accepted(served, host):
    async with served.client.get("/v1/state", headers={"Host": host}) as response:
        assert response.status == 200


async def test_a_probe_may_use_any_name(served):
    async with served.client.get("/healthz", headers={"Host": "evil.example"}) as response:
        assert response.status == 200


@pytest.mark.parametrize("form", ["console", "json"])
async def test_nonsense_fills_no_log(served, capsys, form):
    """Lines of the HTTP library have the form of tmd's lines and are rate-limited."""
    logs.configure(Log(format=form))
    try:
        for _ in range(BURST + 300):
            reader, writer = await knock(served, b"GET / HTTP/9.x\r\nA\x1b[2J: \x00\r\n\r\n")
            await ended(reader)
            writer.close()
    finally:
        structlog.reset_defaults()
    reply = capsys.readouterr().err
    lines = reply.splitlines()

    assert BURST <= len(lines) < BURST + 300
    assert len(reply) < 500 * len(lines)
    assert "\x1b" not in reply
    if form == "json":
        assert {json.loads(line)["logger"] for line in lines} == {"aiohttp.server"}


async def test_a_port_in_use_is_an_error_that_names_the_key(served):
    second = Web(("127.0.0.1", served.port), served.parts)

    with pytest.raises(ConfigError, match=r"\[http\] listen.*" + str(served.port)):
        await asyncio.wait_for(second.run(), WITHIN_S)
