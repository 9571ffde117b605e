"""The heartbeat of this host: periodic, and immediate when a change is urgent."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from tmd.core.alerts.store_health import StoreLoop
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.model import READABLE_VERSION, HostStatus
from tmd.daemon.bus import Store
from tmd.daemon.host_name import HostName
from tmd.daemon.records import Records
from tmd.daemon.roster import Roster
from tmd.daemon.store_health import StoreHealth
from tmd.daemon.watcher import Watcher


class PublisherConfig(Struct, frozen=True):
    name: str
    incarnation: str
    boot: str
    standby: bool
    heartbeat_s: float
    ttl_s: float


class HeartbeatSources(NamedTuple):
    """What a heartbeat tells of."""

    roster: Roster
    watcher: Watcher
    records: Records
    lost: Callable[[], dict[str, dict[str, float]]] = dict
    """Lost rank-seconds by job and cause that this daemon has counted and no record has yet."""


class Publisher:
    """Level-triggered: each heartbeat carries the whole current status."""

    def __init__(
        self,
        config: PublisherConfig,
        sources: HeartbeatSources,
        store: Store,
        store_health: StoreHealth,
    ) -> None:
        self._config = config
        self._roster, self._watcher, self._records, self._lost = sources
        self._store = store
        self._store_health = store_health
        self._host_name = HostName(store, config.ttl_s)

    async def run(self) -> None:
        """Run until cancelled."""
        wake, expires = True, -math.inf
        while True:
            status = self.status()
            try:
                # Claim it at the start, after an outage, and if this process stood still for long.
                if _now() > expires:
                    await self._host_name.claim(status)
                began = _now()
                await self._store.put_host(status, ttl_s=self._config.ttl_s, wake=wake)
            except StoreUnavailable as error:
                await self._store_health.failed(StoreLoop.HEARTBEAT, error)
                wake, expires = True, -math.inf
                continue
            expires = began + self._config.ttl_s
            self._store_health.worked(StoreLoop.HEARTBEAT)
            wake = await self._roster.urgent.wait(self._config.heartbeat_s)

    def status(self) -> HostStatus:
        """The current status of this host."""
        return HostStatus(
            host=self._config.name,
            incarnation=self._config.incarnation,
            boot=self._config.boot,
            standby=self._config.standby,
            workers=self._roster.statuses,
            exits=tuple(self._roster.exits),
            alerts=self._watcher.board.alerts,
            obeyed=self._records.obeyed,
            lost=self._lost(),
            reads=READABLE_VERSION,
            at=time.time(),
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
