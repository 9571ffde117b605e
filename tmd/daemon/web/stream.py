"""Server-sent events: what changed in the state or on the page, and every alert with its cursor as
event id.

A client that reconnects sends ``Last-Event-ID`` and misses no alert. Each stream reads the store
itself and waits for its client, so nothing is queued.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Protocol

import msgspec
from aiohttp import web

from tmd.core.values.errors import StoreUnavailable
from tmd.daemon.web.guard import RequestProblem
from tmd.daemon.web.latest import Latest
from tmd.daemon.web.page_rows import Rows, difference
from tmd.daemon.web.page_samples import History, newer
from tmd.daemon.web.parts import Refused, WebParts
from tmd.daemon.web.reading import cursor_of

FIRST = "0"
"""A cursor before all alerts."""
MOST_STREAMS = 16
QUIET_S = 15.0
"""Longest time in which a stream sends nothing."""
BATCH = 200
READ_S = 30.0
"""A client that does not read for this long is disconnected."""


class News(Protocol):
    """What one stream has sent of the state, and what it sends next."""

    async def fresh(self) -> bytes:
        """Events of what has changed since the last call; empty if nothing has.

        Raises:
            StoreUnavailable: Redis does not answer.
        """

    def interrupted(self) -> None:
        """The client was told that Redis is away: the next call has news, if only that it is
        back."""

    @property
    def nothing(self) -> bytes:
        """What is sent after :data:`QUIET_S` without news, which detects a broken connection."""


class StateNews:
    """``state``: the whole state when it changed."""

    def __init__(self, latest: Latest) -> None:
        self._latest = latest
        self._sent = b""

    async def fresh(self) -> bytes:
        state = _event("state", await self._latest.state())
        if state == self._sent:
            return b""
        self._sent = state
        return state

    def interrupted(self) -> None:
        self._sent = b""

    @property
    def nothing(self) -> bytes:
        return b": quiet\n\n"


class PageNews:
    """``whole``: all rows; from then on ``delta``: those that changed."""

    def __init__(self, latest: Latest, history: History) -> None:
        self._latest = latest
        self._history = history
        self._sent: Rows | None = None
        self._sampled = 0
        """The latest sample that was sent, by its number."""
        self._was_away = False

    async def fresh(self) -> bytes:
        rows = await self._latest.rows()
        samples = newer(self._history.samples, self._sampled)
        self._sampled = max((known[-1].number for known in samples.values()), default=self._sampled)
        before, self._sent = self._sent, rows
        if before is None:
            return _event("whole", msgspec.json.encode({"rows": rows, "samples": samples}))
        changed = difference(before, rows)
        if not (changed or samples or self._was_away):
            return b""
        self._was_away = False
        body = {"rows": changed.rows, "gone": changed.gone, "samples": samples}
        return _event("delta", msgspec.json.encode(body))

    def interrupted(self) -> None:
        self._was_away = True

    @property
    def nothing(self) -> bytes:
        return _event("quiet", b"{}")  # the page sees no comments


class Streams:
    """The open streams of a daemon. :meth:`close` ends them."""

    def __init__(self, parts: WebParts) -> None:
        self._store = parts.store
        self._look_s = parts.look_s
        self._history = parts.history
        self._latest = Latest(parts)
        self._open: set[asyncio.Task[Any]] = set()

    async def state(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, StateNews(self._latest))

    async def page(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, PageNews(self._latest, self._history))

    async def close(self, _: web.Application) -> None:
        for task in tuple(self._open):
            task.cancel()

    async def _serve(self, request: web.Request, news: News) -> web.StreamResponse:
        """Serve until the client disconnects."""
        task = asyncio.current_task()
        assert task is not None
        after = cursor_of(
            request.headers.get("Last-Event-ID", "") or request.query.get("after", "")
        )
        if len(self._open) >= MOST_STREAMS:
            raise Refused(
                RequestProblem(503, "too_many_streams", f"{MOST_STREAMS} streams are open")
            )
        self._open.add(task)
        try:
            cursor = after or await self._store.newest_alert() or FIRST
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
            )
            await response.prepare(request)
            with suppress(ConnectionResetError, TimeoutError):
                # A client that is cut off before the first alert misses none either.
                await response.write(f"id: {cursor}\n\n".encode())
                await self._send(response, news, cursor)
            return response
        finally:
            self._open.discard(task)

    async def _send(self, response: web.StreamResponse, news: News, cursor: str) -> None:
        clock = asyncio.get_running_loop().time
        away = b""
        spoke_at = clock()
        while True:
            sent, found = b"", []
            try:
                found = await self._store.alerts(cursor, limit=BATCH)
                sent = b"".join(_event("alert", msgspec.json.encode(a), c) for c, a in found)
                cursor = found[-1][0] if found else cursor
                sent += await news.fresh()
                away = b""
            except StoreUnavailable as error:
                before, away = away, _event("away", msgspec.json.encode({"away": str(error)}))
                if away != before:
                    sent += away
                news.interrupted()
            if not sent and clock() - spoke_at > QUIET_S:
                sent = news.nothing
            if sent:
                async with asyncio.timeout(READ_S):
                    await response.write(sent)
                spoke_at = clock()
            if len(found) < BATCH:
                await asyncio.sleep(self._look_s)


def _event(kind: str, data: bytes, cursor: str = "") -> bytes:
    # JSON has no raw line breaks, so one data line is enough.
    head = f"id: {cursor}\n" if cursor else ""
    return f"{head}event: {kind}\ndata: ".encode() + data + b"\n\n"
