"""Keeps two machines with the same host name from overwriting each other's heartbeat.

The leader would see the workers of either machine come and go, and take healthy ones for lost. So
the machine that writes first keeps the name until it has been silent for twice the time to live of
a heartbeat. A machine that reboots faster than that waits for the rest of it.
"""

from __future__ import annotations

import asyncio

from tmd.core.values.errors import HostNameTaken, StoreUnavailable
from tmd.core.values.model import HostStatus
from tmd.daemon.bus import Store

TAKEN = (
    "this machine is not seen as host {!r}, since heartbeats of that name come from another boot "
    "({}). If it has booted again, this is over within {:g} s; else another machine has the name: "
    "set another [host] name here"
)


class HostName:
    """The claim of this machine to its host name. ``ttl_s``: time to live of a heartbeat."""

    def __init__(self, store: Store, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._other = ""
        """The boot of the other machine that has the name."""
        self._seen = 0.0
        """When its heartbeat was last there, or may have been (monotonic)."""

    async def claim(self, status: HostStatus) -> None:
        """Return once ``status`` may be written as the heartbeat of its host.

        Raises:
            HostNameTaken: another machine has the name, or had it within the last ``ttl_s``: an
                outage does not cost it the name.
            StoreUnavailable: the store does not answer.
        """
        now = asyncio.get_running_loop().time()
        try:
            boot = await self._store.host_boot(status.host)
        except StoreUnavailable:
            self._seen = now
            raise
        if boot and status.boot and boot != status.boot:
            self._other, self._seen = boot, now
        elif boot is not None:
            return
        if self._other and now - self._seen <= self._ttl_s:
            raise HostNameTaken(TAKEN.format(status.host, self._other, 2 * self._ttl_s))
        if not await self._store.claim_host(status, ttl_s=self._ttl_s):
            return await self.claim(status)
