"""POST: operators' requests over HTTP, the same as those of the command line."""

from __future__ import annotations

import time
import uuid
from typing import Any, TypeVar

import msgspec
import structlog
from aiohttp import hdrs, web
from msgspec import Struct

from tmd.core.values.decode_errors import UNREADABLE, brief
from tmd.core.values.errors import DrainRefused
from tmd.core.values.requests import DrainRequest
from tmd.core.values.view_checks import unknown_host
from tmd.daemon.breaker import end_pause
from tmd.daemon.web.guard import RequestHeaders, RequestProblem, refusal
from tmd.daemon.web.parts import PARTS, Refused, answer

log = structlog.get_logger("tmd.web")

T = TypeVar("T")


class Drain(Struct, frozen=True, forbid_unknown_fields=True):
    host: str
    leave: bool = False
    """Its workers exit afterwards instead of standing by."""
    soft: bool = False
    """The host may take ranks again once it holds none."""
    by: str = ""
    """Name of the requester, for the records."""
    absent: bool = False
    """The cluster may not know the host."""


class Undrain(Struct, frozen=True, forbid_unknown_fields=True):
    host: str


class Nothing(Struct, frozen=True, forbid_unknown_fields=True):
    pass


async def drain(request: web.Request) -> web.Response:
    body = await _admitted(request, Drain)
    store = request.app[PARTS].store
    unknown = unknown_host(await store.snapshot(), body.host)
    if unknown and not body.absent:
        raise Refused(RequestProblem(404, "unknown_host", unknown))
    by = body.by or f"http {request.remote}"
    drain_request = DrainRequest(
        host=body.host,
        id=uuid.uuid4().hex,
        leave=body.leave,
        soft=body.soft,
        by=by,
        at=time.time(),
    )
    try:
        await store.drain(drain_request)
    except DrainRefused as error:
        raise Refused(RequestProblem(409, "drained", str(error))) from None
    return answer({"drain": drain_request}, 202)


async def undrain(request: web.Request) -> web.Response:
    body = await _admitted(request, Undrain)
    if not await request.app[PARTS].store.undrain(body.host):
        raise Refused(RequestProblem(404, "no_drain", f"'{body.host}' has no drain request"))
    return answer({"undrained": body.host})


async def pause(request: web.Request) -> web.Response:
    await _admitted(request, Nothing)
    await request.app[PARTS].store.set_paused(True)
    return answer({"paused": True})


async def resume(request: web.Request) -> web.Response:
    await _admitted(request, Nothing)
    parts = request.app[PARTS]
    await end_pause(parts.store, f"http {request.remote}", parts.local().status.host)
    return answer({"paused": False})


async def _admitted(request: web.Request, kind: type[T]) -> T:
    """The body of a request that may change the state. Logs what it refuses, too."""
    parts = request.app[PARTS]
    headers = RequestHeaders(
        host=request.headers.get(hdrs.HOST, ""),
        authorization=request.headers.get(hdrs.AUTHORIZATION, ""),
        origin=request.headers.get(hdrs.ORIGIN, ""),
        fetch_site=request.headers.get("Sec-Fetch-Site", ""),
        content_type=request.content_type,
    )
    problem = refusal(headers, parts.token, parts.names)
    client: dict[str, Any] = {"path": request.path, "remote": request.remote}
    if problem is not None:
        log.warning("request refused", **client, reason=problem.code)
        raise Refused(problem)
    try:
        body = msgspec.json.decode(await request.read() or b"{}", type=kind)
    except UNREADABLE as error:
        log.warning("request refused", **client, reason="bad_body")
        raise Refused(RequestProblem(400, "bad_body", brief(error))) from None
    log.info("request of an operator", **client, body=str(body))
    return body
