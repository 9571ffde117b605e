"""Running a detector in a test."""

from __future__ import annotations

from contextlib import aclosing, asynccontextmanager

from tmd.testing import FakeContext


@asynccontextmanager
async def signals_of(detector, config, state_dir):
    """The signals of a running detector, which stops with the block."""
    context = FakeContext(config, host="h1", state_dir=state_dir)
    async with aclosing(detector.watch(context)) as signals:
        yield signals
