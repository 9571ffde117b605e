"""Waiting for what gives no event: files and counters of other processes, and their states."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_S = 0.02


async def until(holds: Callable[[], bool]) -> None:
    """Look until it holds, in a thread: looking may block. Whoever asks sets the limit."""
    while not await asyncio.to_thread(holds):  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
