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
from tmd.core.values.model import Alert, ClusterView
from tmd.core.values.requests import HealthyRequest
from tmd.daemon.bus import Store

KEPT = 1000
"""Most bans that are remembered. One that was lifted shows another host's as shared."""

log = structlog.get_logger("tmd.leader")


class SharedBans:
    """Asks once for each ban, while this daemon leads. A host that serves a request again, for the
    next leader, has no such ban any more."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, Alert] = {}
        """All bans seen so far, by id."""
        self._asked: set[str] = set()

    async def lift(self, view: ClusterView, rules: BreakerRules) -> None:
        """Ask the hosts of all shared bans in ``view`` to lift them.

        Raises:
            StoreUnavailable: not all could be asked.
        """
        present = [a for host in view.hosts for a in host.alerts if a.code == BANNED]
        if not present:
            return
        self._remember(present)
        shared = shared_bans(self._known.values(), rules)
        for ban in present:
            if ban.id in shared and ban.id not in self._asked:
                await self._ask(ban, shared[ban.id])

    def _remember(self, present: list[Alert]) -> None:
        self._known |= {ban.id: ban for ban in present}
        for forgotten in list(self._known)[:-KEPT]:
            del self._known[forgotten]
        self._asked &= self._known.keys()

    async def _ask(self, ban: Alert, why: str) -> None:
        by = f"the leader, since {why}"
        request = HealthyRequest(ban.host, f"{ban.id}-shared", BANNED, by=by, at=time.time())
        await self._store.declare_healthy(request)
        log.warning("a ban is lifted", host=ban.host, reason=why)
        self._asked.add(ban.id)
