"""The latest view of the cluster, read once for all streams, as rows and as JSON."""

from __future__ import annotations

import asyncio
import time
from math import inf

import msgspec

from tmd.core.values.model import ClusterView
from tmd.daemon.bus import described
from tmd.daemon.web.page_rows import Rows, rows_of
from tmd.daemon.web.parts import WebParts


class Latest:
    """Reads Redis only when a stream asks, and at most once in half of ``look_s``."""

    def __init__(self, parts: WebParts) -> None:
        self._parts = parts
        self._read: tuple[ClusterView, str] = ClusterView(), ""
        self._read_at = -inf
        self._reading = asyncio.Lock()
        self._rows: Rows = {}
        self._rows_at = -inf
        self._state = b""
        self._state_at = -inf

    async def view(self) -> tuple[ClusterView, str]:
        """The view and the leader.

        Raises:
            StoreUnavailable: Redis does not answer.
        """
        clock, store = asyncio.get_running_loop().time, self._parts.store
        async with self._reading:
            if clock() - self._read_at >= self._parts.look_s / 2:
                self._read = await store.snapshot(), await store.leader()
                self._read_at = clock()
            return self._read

    async def state(self) -> bytes:
        """What ``tmd status --json`` prints."""
        read = await self.view()
        if self._state_at != self._read_at:
            self._state = msgspec.json.encode(described(*read))
            self._state_at = self._read_at
        return self._state

    async def rows(self) -> Rows:
        """The rows of the page, built once a read. Adds a sample of each job to the history."""
        view, leader = await self.view()
        if self._rows_at != self._read_at:
            local = self._parts.local()
            self._rows = rows_of(view, leader, local.cluster, local.status.host)
            self._parts.history.take(view, time.time())
            self._rows_at = self._read_at
        return self._rows
