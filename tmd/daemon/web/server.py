"""The listener: one application, bounded in connections and body sizes, stopped with its task."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from tmd.core.values.errors import ConfigError, StoreUnavailable
from tmd.daemon.web import acting
from tmd.daemon.web.assets import Assets
from tmd.daemon.web.connections import ConnectionLimits, Connections
from tmd.daemon.web.guard import RequestProblem, wrong_host
from tmd.daemon.web.parts import PARTS, Refused, WebParts, complaint
from tmd.daemon.web.reading import events, healthz, metrics, readyz, state
from tmd.daemon.web.stream import Streams

log = structlog.get_logger("tmd.web")

LARGEST_BODY = 16 * 1024
MOST_READS, MOST_CHANGES = 16, 8
"""Most concurrent requests. With the streams, fewer than the connections: a probe gets in."""
PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths that are never refused as too busy."""
SAMPLE_S = 2.0
STREAMS = frozenset({"/v1/stream", "/v1/page"})

CONNECTIONS: web.AppKey[Connections] = web.AppKey("connections", Connections)
LIMITS: web.AppKey[ConnectionLimits] = web.AppKey("limits", ConnectionLimits)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Web:
    """Serves while :meth:`run` runs."""

    def __init__(
        self, address: tuple[str, int], parts: WebParts, limits: ConnectionLimits | None = None
    ) -> None:
        self.listening = asyncio.Event()
        self.port = 0
        """The bound port, once ``listening``."""
        self._address = address
        self._parts = parts
        self._limits = limits or ConnectionLimits()

    async def run(self) -> None:
        """Run until cancelled.

        Raises:
            ConfigError: the address cannot be bound.
        """
        runner = web.AppRunner(
            app := application(self._parts),
            access_log=None,
            # No request is counted before its connection is: see `Connections`.
            keepalive_timeout=2 * self._limits.next_s,
            shutdown_timeout=1.0,
        )
        app[LIMITS] = self._limits
        app[CONNECTIONS] = connections = Connections(lambda: _handlers(runner)(), self._limits)
        await runner.setup()
        try:
            server = await self._listen(connections)
            self.port = server.sockets[0].getsockname()[1]
            log.info("serving http", host=self._address[0], port=self.port)
            self.listening.set()
            try:
                await self._keep_history()
            finally:
                server.close()
        finally:
            await runner.cleanup()

    async def _keep_history(self) -> None:
        """Sample the jobs while this daemon leads: a page that is opened later shows the past."""
        while True:
            view = self._parts.local().view
            if view is not None:
                self._parts.history.take(view, time.time())
            await asyncio.sleep(SAMPLE_S)

    async def _listen(self, connections: Connections) -> asyncio.Server:
        host, port = self._address
        try:
            return await asyncio.get_running_loop().create_server(connections.welcome, host, port)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"[http] listen: cannot listen on {host}:{port}: {reason}; "
                'choose another port, or "" to serve no HTTP'
            ) from None


def _handlers(runner: web.AppRunner) -> web.Server:
    assert runner.server is not None
    return runner.server


def application(parts: WebParts) -> web.Application:
    """All routes."""
    middlewares = [_limit_time, _errors, _check_host_name, _limit_load()]
    app = web.Application(client_max_size=LARGEST_BODY, middlewares=middlewares)
    app[PARTS] = parts
    streams, assets = Streams(parts), Assets()
    app.on_shutdown.append(streams.close)
    app.router.add_get("/", assets.index)
    app.router.add_get("/static/{path:.+}", assets.file)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/state", state)
    app.router.add_get("/v1/events", events)
    app.router.add_get("/v1/stream", streams.state)
    app.router.add_get("/v1/page", streams.page)
    app.router.add_post("/v1/drain", acting.drain)
    app.router.add_post("/v1/undrain", acting.undrain)
    app.router.add_post("/v1/pause", acting.pause)
    app.router.add_post("/v1/resume", acting.resume)
    return app


@web.middleware
async def _limit_time(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Drop a client that sends its body or reads its answer too slowly."""
    with request.app[CONNECTIONS].answering(request.protocol):
        if request.path in STREAMS:
            return await handler(request)
        try:
            async with asyncio.timeout(request.app[LIMITS].answer_s):
                response = await handler(request)
                await response.prepare(request)
                await response.write_eof()
                return response
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("too slow") from None


@web.middleware
async def _check_host_name(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse foreign host names: another site's name may resolve to this daemon (DNS rebinding)."""
    if request.path != "/healthz":
        problem = wrong_host(request.headers.get(hdrs.HOST, ""), request.app[PARTS].names)
        if problem is not None:
            raise Refused(problem)
    return await handler(request)


def _limit_load() -> Middleware:
    """Bounds the requests other than probes, streams and the files of the page."""
    taken: Counter[bool] = Counter()

    @web.middleware
    async def place(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in PROBES | STREAMS or request.path.startswith("/static/"):
            return await handler(request)
        changes = request.method == hdrs.METH_POST
        most = MOST_CHANGES if changes else MOST_READS
        if taken[changes] >= most:
            message = f"{most} requests of this kind are being answered; try again"
            raise Refused(RequestProblem(503, "too_busy", message))
        taken[changes] += 1
        try:
            return await handler(request)
        finally:
            taken[changes] -= 1

    return place


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error is JSON with a code for programs and a message for people."""
    try:
        return await handler(request)
    except Refused as refused:
        return complaint(refused.problem)
    except StoreUnavailable as error:
        return complaint(RequestProblem(503, "store_unavailable", str(error)))
    except web.HTTPException as error:
        code = error.reason.lower().replace(" ", "_")
        response = complaint(RequestProblem(error.status, code, f"{error.reason}: {request.path}"))
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        return response
    except ConnectionError:
        raise  # the client has disconnected
    except Exception:
        # A bug in one handler must not look like a failure of the daemon.
        log.exception("http request failed", path=request.path)
        return complaint(
            RequestProblem(500, "internal_error", "an error in tmd; see the daemon's log")
        )
