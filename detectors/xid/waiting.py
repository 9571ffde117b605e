"""Waiting for one of several file descriptors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


async def readable(fds: Iterable[int], seconds: float) -> None:
    """Wait until one of ``fds`` is readable, or ``seconds`` have passed."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    watched = tuple(fds)
    for fd in watched:
        loop.add_reader(fd, ready.set)
    try:
        async with asyncio.timeout(seconds):
            await ready.wait()
    except TimeoutError:
        pass
    finally:
        for fd in watched:
            loop.remove_reader(fd)
