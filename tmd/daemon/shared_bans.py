"""Lifts bans whose cause lies outside of one host, such as a switch that several hosts lost.

A host bans itself, and knows nothing of the others. The leader asks it to lift such a ban, by the
request that 'tmd set-healthy' makes.
"""

from __future__ import annotations

import asyncio
import time

import structlog
from msgspec import Struct

from tmd.core.alerts.breaker import BreakerRules
from tmd.core.alerts.correlated_faults import shared_bans
from tmd.core.alerts.findings import BANNED
from tmd.core.values.model import Alert, ClusterView
from tmd.core.values.requests import HealthyRequest
from tmd.daemon.bus import Store

WAIT_S = 60.0
"""A shared ban is lifted only this long after it was first seen, so that those of other hosts meet
it, also under the next leader. A request that is lost is made again after as long."""
KEPT = 1000
"""Most bans that are remembered. One that was lifted shows that of another host as shared."""

log = structlog.get_logger("tmd.leader")


class _KnownBan(Struct):
    """A ban, and from when on its host may be asked (seconds of the event loop's clock)."""

    alert: Alert
    due: float


class SharedBans:
    """Asks hosts to lift shared bans. To ask twice does no harm: the ban is gone by then."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, _KnownBan] = {}
        """By id, those that were seen last at the end."""

    async def lift(self, view: ClusterView, rules: BreakerRules) -> None:
        """Ask the hosts of all shared bans in ``view`` to lift them.

        Raises:
            StoreUnavailable: not all could be asked.
        """
        present = [a for host in view.hosts for a in host.alerts if a.code == BANNED]
        if not present:
            return
        now = asyncio.get_running_loop().time()
        for ban in present:
            self._known[ban.id] = self._known.pop(ban.id, _KnownBan(ban, now + WAIT_S))
        for forgotten in list(self._known)[:-KEPT]:
            del self._known[forgotten]
        shared = shared_bans((known.alert for known in self._known.values()), rules)
        for ban in present:
            known = self._known.get(ban.id)
            if known is not None and ban.id in shared and now >= known.due:
                await self._ask(ban, shared[ban.id])
                known.due = now + WAIT_S

    async def _ask(self, ban: Alert, why: str) -> None:
        by = f"the leader, since {why}"
        request = HealthyRequest(ban.host, f"{ban.id}-shared", BANNED, by=by, at=time.time())
        await self._store.declare_healthy(request)
        log.warning("asked to lift a ban", host=ban.host, reason=why)
