"""Reports to the log whether the store serves this daemon, and spaces out attempts while not."""

from __future__ import annotations

import asyncio
import random

import structlog

from tmd.core.errors import StoreUnavailable
from tmd.core.store_health import Activity, Change, StoreState, failed, worked

log = structlog.get_logger("tmd.store")

FIRST_S = 0.05
LONGEST_S = 1.0


class StoreHealth:
    """One per daemon, shared by all loops that use the store.

    :func:`tmd.core.store_health.failed` and :func:`~tmd.core.store_health.worked` decide what is
    worth a line; each loop backs off by itself.
    """

    def __init__(self) -> None:
        self.state = StoreState()
        self._pauses: dict[Activity, float] = {}

    def worked(self, activity: Activity) -> None:
        """The latest attempt succeeded, or there is nothing to attempt at present."""
        self._pauses.pop(activity, None)
        self.state, change = worked(self.state, activity, _now())
        if change is Change.BACK:
            log.info("store is back")

    async def failed(self, activity: Activity, error: StoreUnavailable) -> None:
        """Note the failure, then pause with jitter: longer after each failure in a row."""
        cause = str(error)
        self.state, change = failed(self.state, activity, cause, _now())
        if change is Change.LOST:
            log.warning("store away, nothing new is decided", activity=activity, error=cause)
        elif change is Change.OTHER_CAUSE:
            log.warning("store away for another reason as well", activity=activity, error=cause)
        pause = self._pauses.get(activity, FIRST_S)
        self._pauses[activity] = min(2 * pause, LONGEST_S)
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))


def _now() -> float:
    return asyncio.get_running_loop().time()
