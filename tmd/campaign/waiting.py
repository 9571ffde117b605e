"""Waits for facts without an event: files, counters and states of other processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_S = 0.02


async def until(holds: Callable[[], bool]) -> None:
    """Poll without a limit until it holds, in a thread, since a look may block."""
    while not await asyncio.to_thread(holds):  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
