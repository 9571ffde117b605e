"""GET: health, state, events, metrics."""

from __future__ import annotations

import re

from aiohttp import hdrs, web

from tmd.daemon.bus import state_of
from tmd.daemon.web.guard import RequestProblem
from tmd.daemon.web.metrics import exposition
from tmd.daemon.web.parts import PARTS, Refused, answer

PAGE_LIMIT = 1000
CURSOR = re.compile(r"[0-9]{1,19}(-[0-9]{1,19})?")


async def healthz(_: web.Request) -> web.Response:
    """Answers if the loop runs."""
    return answer({"ok": True})


async def readyz(request: web.Request) -> web.Response:
    """Whether this daemon can do all its work, from its latest results: no probe reaches Redis.

    The heartbeat tests writing: a Redis that serves reads and refuses writes is not enough.
    """
    local = request.app[PARTS].local()
    problems = list(local.store.causes)
    if not local.serving:
        problems.append("the socket for trainers is not open")
    if not (problems or local.store.written):
        problems.append("no heartbeat has been written to Redis yet")
    return answer({"ready": not problems, "problems": problems}, 503 if problems else 200)


async def state(request: web.Request) -> web.Response:
    """The same as ``tmd status --json``."""
    return answer(await state_of(request.app[PARTS].store))


async def events(request: web.Request) -> web.Response:
    """A page of alerts after a cursor, oldest first; ``next`` is the cursor to continue from."""
    after = cursor_of(request.query.get("after", ""))
    limit = request.query.get("limit", "100")
    is_short = limit.isascii() and limit.isdecimal() and len(limit) <= len(str(PAGE_LIMIT))
    if not (is_short and 0 < int(limit) <= PAGE_LIMIT):
        raise Refused(RequestProblem(400, "bad_limit", f"limit must be 1 to {PAGE_LIMIT}"))
    found = await request.app[PARTS].store.alerts(after, limit=int(limit))
    shown = [{"cursor": cursor, "alert": alert} for cursor, alert in found]
    return answer({"events": shown, "next": found[-1][0] if found else after})


def cursor_of(text: str) -> str:
    """``text`` if it is a cursor or empty.

    Raises:
        Refused: it is neither.
    """
    if text and not CURSOR.fullmatch(text):
        raise Refused(
            RequestProblem(400, "bad_cursor", "a cursor is the value of 'next' or of an event's id")
        )
    return text


async def metrics(request: web.Request) -> web.Response:
    """Metrics of this daemon, and of the cluster if it leads. A scrape does not use Redis."""
    accept = request.headers.get(hdrs.ACCEPT, "")
    body, content_type = exposition(request.app[PARTS].local(), accept)
    return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})
