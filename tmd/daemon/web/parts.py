"""State that the HTTP handlers read, and their answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct

from tmd.core.alerts.store_health import StoreState
from tmd.core.planning.election import Lease
from tmd.core.values.model import ClusterView, HostStatus
from tmd.daemon.bus import Store
from tmd.daemon.counters import AlertCounter, JobCounter
from tmd.daemon.web.guard import RequestProblem
from tmd.daemon.web.page_samples import History
from tmd.schema import Secret


class Local(Struct, frozen=True):
    """The current state of this daemon."""

    cluster: str
    status: HostStatus
    """The current heartbeat."""
    serving: bool
    """Whether trainers can connect."""
    leading: bool
    lease: Lease
    alerts: AlertCounter
    jobs: JobCounter
    view: ClusterView | None
    """The leader's latest view of the cluster; ``None`` on any other host, and without Redis."""
    store: StoreState
    """The latest results of its loops' requests to Redis."""


class WebParts(Struct, frozen=True):
    """One per daemon."""

    store: Store
    local: Callable[[], Local]
    token: Secret | None
    names: frozenset[str]
    """Accepted names in a Host header, besides those of the loopback."""
    history: History
    look_s: float = 1.0
    """Interval at which streams look for news."""


PARTS: web.AppKey[WebParts] = web.AppKey("parts", WebParts)


class Refused(Exception):
    """Carries a :class:`RequestProblem` to the client."""

    def __init__(self, problem: RequestProblem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def answer(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )


def complaint(problem: RequestProblem) -> web.Response:
    response = answer({"error": {"code": problem.code, "message": problem.message}}, problem.status)
    if problem.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if problem.status == 503:
        response.headers["Retry-After"] = "1"
    return response
