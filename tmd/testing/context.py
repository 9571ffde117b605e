"""A detector's context for its tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from tmd.plugin import DetectorConfig, WorkerEvent


class FakeContext:
    """Implements :class:`tmd.plugin.DetectorContext` on the loop's own clock.

    It passes each worker event on once, in order. The daemon passes on the latest one of each
    worker, again and again.

    Args:
        config: the value of ``ctx.config``.
        state_dir: a folder of the test, for detectors that store state.
    """

    def __init__(
        self,
        config: DetectorConfig | None = None,
        host: str = "host-1",
        state_dir: Path | None = None,
    ) -> None:
        self._config = config if config is not None else DetectorConfig()
        self._host = host
        self._state_dir = state_dir
        self._events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        self.has_looked = False
        """Whether the detector has called :meth:`looked`."""
        self.idle = asyncio.Event()
        """Set when the detector sleeps, or waits for an event, for the first time."""

    @property
    def host(self) -> str:
        return self._host

    @property
    def config(self) -> DetectorConfig:
        return self._config

    @property
    def state_dir(self) -> Path:
        if self._state_dir is None:
            raise ValueError("this detector stores state: use FakeContext(..., state_dir=tmp_path)")
        return self._state_dir

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def looked(self) -> None:
        self.has_looked = True

    async def sleep(self, seconds: float) -> None:
        self.idle.set()
        await asyncio.sleep(seconds)

    def tell(self, event: WorkerEvent) -> None:
        """Let the detector see ``event``."""
        self._events.put_nowait(event)

    async def worker_events(self) -> AsyncIterator[WorkerEvent]:
        while True:
            if self._events.empty():
                self.idle.set()
            yield await self._events.get()
