"""The listener: one application, bounded in connections and bodies, ended with its task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from tmd.core.errors import ConfigError, StoreUnavailable
from tmd.daemon.web import acting
from tmd.daemon.web.guard import Problem
from tmd.daemon.web.parts import PARTS, Parts, Refused, complaint
from tmd.daemon.web.reading import Metrics, Page, events, healthz, readyz, state
from tmd.daemon.web.stream import Streams

log = structlog.get_logger("tmd.web")

MOST_CONNECTIONS = 64
LARGEST_BODY = 16 * 1024
KEEPALIVE_S = 15.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Web:
    """Serves while :meth:`run` runs."""

    def __init__(self, address: tuple[str, int], parts: Parts) -> None:
        self.listening = asyncio.Event()
        self.port = 0
        """The one that is listened at, once ``listening``."""
        self._address = address
        self._parts = parts

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            ConfigError: the address cannot be listened at.
        """
        runner = web.AppRunner(
            application(self._parts),
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=1.0,
        )
        await runner.setup()
        try:
            server = await self._listen(runner)
            self.port = server.sockets[0].getsockname()[1]
            log.info("http serves", host=self._address[0], port=self.port)
            self.listening.set()
            try:
                await asyncio.Event().wait()
            finally:
                server.close()
        finally:
            await runner.cleanup()

    async def _listen(self, runner: web.AppRunner) -> asyncio.Server:
        host, port = self._address
        handlers = runner.server
        assert handlers is not None

        def accept() -> asyncio.BaseProtocol:
            if len(handlers.connections) >= MOST_CONNECTIONS:
                return _Full()
            return handlers()

        try:
            return await asyncio.get_running_loop().create_server(accept, host, port)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"[http] listen: cannot listen at {host}:{port}: {reason}; "
                'choose another port, or "" to serve no HTTP'
            ) from None


class _Full(asyncio.Protocol):
    """There are enough connections: this one is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def application(parts: Parts) -> web.Application:
    """All routes."""
    app = web.Application(client_max_size=LARGEST_BODY, middlewares=[_errors])
    app[PARTS] = parts
    streams, metrics, page = Streams(), Metrics(), Page()
    app.on_shutdown.append(streams.close)
    app.router.add_get("/", page.get)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics.get)
    app.router.add_get("/v1/state", state)
    app.router.add_get("/v1/events", events)
    app.router.add_get("/v1/stream", streams.get)
    app.router.add_post("/v1/drain", acting.drain)
    app.router.add_post("/v1/undrain", acting.undrain)
    app.router.add_post("/v1/pause", acting.pause)
    app.router.add_post("/v1/resume", acting.resume)
    return app


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error is JSON with a code for programs and a sentence for people."""
    try:
        return await handler(request)
    except Refused as refused:
        return complaint(refused.problem)
    except StoreUnavailable as error:
        return complaint(Problem(503, "store_unavailable", str(error)))
    except web.HTTPException as error:
        code = error.reason.lower().replace(" ", "_")
        said = complaint(Problem(error.status, code, f"{error.reason}: {request.path}"))
        if isinstance(error, web.HTTPMethodNotAllowed):
            said.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
        return said
    except ConnectionError:
        raise  # the client has gone
    except Exception:
        # A mistake of ours in one answer must not look like one of the daemon.
        log.exception("http request failed", path=request.path)
        return complaint(Problem(500, "internal_error", "a mistake of tmd, see the daemon's log"))
