"""POST: what operators may ask over HTTP. The same requests as those of the command line."""

from __future__ import annotations

import time
import uuid
from typing import Any, TypeVar

import msgspec
import structlog
from aiohttp import hdrs, web
from msgspec import Struct

from tmd.core.values.decode_errors import UNREADABLE, brief
from tmd.core.values.requests import DrainRequest
from tmd.core.values.view_checks import unknown_host
from tmd.daemon.web.guard import Asked, RequestProblem, refusal
from tmd.daemon.web.parts import PARTS, Refused, answer

log = structlog.get_logger("tmd.web")

T = TypeVar("T")


class Drain(Struct, frozen=True, forbid_unknown_fields=True):
    host: str
    leave: bool = False
    """Its workers exit afterwards instead of standing by."""
    soft: bool = False
    """Once it holds no rank, it may take ranks again."""
    by: str = ""
    """Who asks, for the records."""


class Undrain(Struct, frozen=True, forbid_unknown_fields=True):
    host: str


class Nothing(Struct, frozen=True, forbid_unknown_fields=True):
    pass


async def drain(request: web.Request) -> web.Response:
    body = await _admitted(request, Drain)
    store = request.app[PARTS].store
    unknown = unknown_host(await store.snapshot(), body.host)
    if unknown:
        raise Refused(RequestProblem(404, "unknown_host", unknown))
    by = body.by or f"http {request.remote}"
    asked = DrainRequest(
        host=body.host,
        id=uuid.uuid4().hex,
        leave=body.leave,
        soft=body.soft,
        by=by,
        at=time.time(),
    )
    await store.drain(asked)
    return answer({"drain": asked}, 202)


async def undrain(request: web.Request) -> web.Response:
    body = await _admitted(request, Undrain)
    if not await request.app[PARTS].store.undrain(body.host):
        raise Refused(RequestProblem(404, "no_drain", f"no drain of '{body.host}' is requested"))
    return answer({"undrained": body.host})


async def pause(request: web.Request) -> web.Response:
    return await _set_paused(request, True)


async def resume(request: web.Request) -> web.Response:
    return await _set_paused(request, False)


async def _set_paused(request: web.Request, paused: bool) -> web.Response:
    await _admitted(request, Nothing)
    await request.app[PARTS].store.set_paused(paused)
    return answer({"paused": paused})


async def _admitted(request: web.Request, kind: type[T]) -> T:
    """The body of a request that may change the state. Every one is logged, also the refused."""
    parts = request.app[PARTS]
    asked = Asked(
        host=request.headers.get(hdrs.HOST, ""),
        authorization=request.headers.get(hdrs.AUTHORIZATION, ""),
        origin=request.headers.get(hdrs.ORIGIN, ""),
        fetch_site=request.headers.get("Sec-Fetch-Site", ""),
        content_type=request.content_type,
    )
    problem = refusal(asked, parts.token, parts.names)
    said: dict[str, Any] = {"path": request.path, "remote": request.remote}
    if problem is not None:
        log.warning("request refused", **said, reason=problem.code)
        raise Refused(problem)
    try:
        body = msgspec.json.decode(await request.read() or b"{}", type=kind)
    except UNREADABLE as error:
        raise Refused(RequestProblem(400, "bad_body", brief(error))) from None
    log.info("request of an operator", **said, body=str(body))
    return body
