"""Logs whether the store serves this daemon, and backs off while it does not."""

from __future__ import annotations

import asyncio
import random

import structlog

from tmd.core.alerts.store_health import HealthChange, StoreLoop, StoreState, failed, worked
from tmd.core.values.errors import StoreUnavailable

log = structlog.get_logger("tmd.store")

FIRST_S = 0.05
LONGEST_S = 1.0


class StoreHealth:
    """One per daemon, shared by all loops that use the store.

    :mod:`tmd.core.alerts.store_health` decides what is logged; each loop backs off by itself.
    """

    def __init__(self) -> None:
        self.state = StoreState()
        self._lost_at: float | None = None
        self._back_at: float | None = None
        """When the latest outage began and ended (monotonic)."""
        self._pauses: dict[StoreLoop, float] = {}

    def outage_age_s(self, within_s: float) -> float | None:
        """Seconds since the latest outage began, if it lasts or ended at most ``within_s`` ago."""
        if self._lost_at is None:
            return None
        if self._back_at is not None and _now() - self._back_at > within_s:
            return None
        return _now() - self._lost_at

    def worked(self, loop: StoreLoop) -> None:
        """Note that the latest attempt succeeded, or that there is nothing to attempt."""
        self._pauses.pop(loop, None)
        self.state, change = worked(self.state, loop, _now())
        if change is HealthChange.BACK:
            self._back_at = _now()
            log.info("store is available again")

    async def failed(self, loop: StoreLoop, error: StoreUnavailable) -> None:
        """Note the failure, then pause with jitter: longer after each consecutive failure."""
        cause = str(error)
        self.state, change = failed(self.state, loop, cause, _now())
        if change is HealthChange.LOST:
            self._lost_at, self._back_at = _now(), None
            log.warning("store unavailable, no new decisions", loop=loop, error=cause)
        elif change is HealthChange.OTHER_CAUSE:
            log.warning("store unavailable for another reason, too", loop=loop, error=cause)
        pause = self._pauses.get(loop, FIRST_S)
        self._pauses[loop] = min(2 * pause, LONGEST_S)
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))


def _now() -> float:
    return asyncio.get_running_loop().time()
