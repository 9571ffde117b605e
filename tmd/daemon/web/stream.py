"""Server-sent events: the state when it changes, and every alert with its cursor as event id.

A client that reconnects sends ``Last-Event-ID`` and misses nothing. Each stream reads the store
itself and waits for its client, so nothing is queued.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from math import inf
from typing import Any

import msgspec
from aiohttp import web

from tmd.core.values.errors import StoreUnavailable
from tmd.daemon.bus import Store, state_of
from tmd.daemon.web.guard import RequestProblem
from tmd.daemon.web.parts import PARTS, Refused
from tmd.daemon.web.reading import cursor_of

MOST_STREAMS = 16
LOOK_S = 1.0
QUIET_S = 15.0
"""Interval of keep-alive comments without news, which detect a broken connection."""
BATCH = 200
READ_S = 30.0
"""A client that does not read for this long is disconnected."""


class Streams:
    """The open streams of a daemon. :meth:`close` ends them."""

    def __init__(self) -> None:
        self._open: set[asyncio.Task[Any]] = set()
        self._state = b""
        self._looked_at = -inf

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Serve until the client disconnects."""
        task = asyncio.current_task()
        assert task is not None
        store = request.app[PARTS].store
        after = cursor_of(
            request.headers.get("Last-Event-ID", "") or request.query.get("after", "")
        )
        if len(self._open) >= MOST_STREAMS:
            raise Refused(
                RequestProblem(503, "too_many_streams", f"{MOST_STREAMS} streams are open")
            )
        self._open.add(task)
        try:
            cursor = after or await store.newest_alert()
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
            )
            await response.prepare(request)
            with suppress(ConnectionResetError, TimeoutError):
                await self._send(response, store, cursor)
            return response
        finally:
            self._open.discard(task)

    async def close(self, _: web.Application) -> None:
        for task in tuple(self._open):
            task.cancel()

    async def _send(self, response: web.StreamResponse, store: Store, cursor: str) -> None:
        clock = asyncio.get_running_loop().time
        shown = b""
        spoke_at = clock()
        while True:
            news, found = b"", []
            try:
                found = await store.alerts(cursor, limit=BATCH)
                news = b"".join(_event("alert", msgspec.json.encode(a), c) for c, a in found)
                cursor = found[-1][0] if found else cursor
                state = await self._look(store)
            except StoreUnavailable as error:
                state = _event("away", msgspec.json.encode({"away": str(error)}))
            if state != shown:
                news += state
                shown = state
            if not news and clock() - spoke_at > QUIET_S:
                news = b": quiet\n\n"
            if news:
                async with asyncio.timeout(READ_S):
                    await response.write(news)
                spoke_at = clock()
            if len(found) < BATCH:
                await asyncio.sleep(LOOK_S)

    async def _look(self, store: Store) -> bytes:
        """The state as an event, read once for all streams."""
        now = asyncio.get_running_loop().time()
        if now - self._looked_at >= LOOK_S / 2:
            self._state = _event("state", msgspec.json.encode(await state_of(store)))
            self._looked_at = now
        return self._state


def _event(kind: str, data: bytes, cursor: str = "") -> bytes:
    # JSON has no raw line breaks, so one data line is enough.
    head = f"id: {cursor}\n" if cursor else ""
    return f"{head}event: {kind}\ndata: ".encode() + data + b"\n\n"
