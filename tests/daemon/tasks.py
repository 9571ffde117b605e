"""Parts of a daemon as tasks of a test."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager


@asynccontextmanager
async def running(*parts):
    """Run each part while the block lasts; yields their tasks in order."""
    tasks = [asyncio.create_task(part.run()) for part in parts]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
