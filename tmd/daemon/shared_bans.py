"""Lifts bans whose cause lies outside of one host, such as a switch that several hosts lost.

A host bans itself, and knows nothing of the others. The leader asks it to lift such a ban, by the
request that 'tmd set-healthy' makes.
"""

from __future__ import annotations

import time

import structlog

from tmd.core.alerts.breaker import BreakerRules
from tmd.core.alerts.correlated_faults import shared_bans
from tmd.core.alerts.findings import BANNED
from tmd.core.values.model import ClusterView
from tmd.core.values.requests import HealthyRequest
from tmd.daemon.bus import Store

log = structlog.get_logger("tmd.leader")


class SharedBans:
    """Asks once for each ban, while this daemon leads. A host that serves a request again, for the
    next leader, has no such ban any more."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asked: set[str] = set()
        """Ids of the bans."""

    async def lift(self, view: ClusterView, rules: BreakerRules) -> None:
        """Ask the hosts of all shared bans in ``view`` to lift them.

        Raises:
            StoreUnavailable: not all could be asked.
        """
        found = shared_bans(view, rules)
        self._asked &= {ban.id for ban, _ in found}
        for ban, why in found:
            if ban.id in self._asked:
                continue
            by = f"the leader, since {why}"
            request = HealthyRequest(ban.host, f"{ban.id}-shared", BANNED, by=by, at=time.time())
            await self._store.declare_healthy(request)
            log.warning("a ban is lifted", host=ban.host, reason=why)
            self._asked.add(ban.id)
