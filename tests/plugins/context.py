"""What a detector is given, for tests that run one."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager


class Context:
    """A :class:`tmd.plugin.DetectorContext` on the loop's clock, without workers."""

    host = "h1"

    def __init__(self, config, state_dir):
        self.config = config
        self.state_dir = state_dir

    def now(self):
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds):
        await asyncio.sleep(seconds)

    async def worker_events(self):
        await asyncio.Event().wait()
        yield


@asynccontextmanager
async def signals_of(detector, config, state_dir):
    """The signals of a running detector; it is stopped with the block."""
    async with aclosing(detector.watch(Context(config, state_dir))) as signals:
        yield signals
