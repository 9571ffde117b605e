"""Opens and closes the circuit breaker in the store, and publishes its alerts."""

from __future__ import annotations

import time

import structlog
from msgspec import structs

from tmd.core.alerts.breaker import BreakerRules, ahead, tripped
from tmd.core.values.breaker_state import Breaker
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.model import Alert, ClusterView, Severity, State, Strategy
from tmd.daemon.bus import Store

log = structlog.get_logger("tmd.leader")

OPEN = "breaker.open"
CLOCK_SKEW_S = 300.0
"""By how much the clock of Redis may be behind that of the leader which opened the breaker."""


class BreakerWatch:
    """Opens the circuit breaker if its rules require that.

    ``holder``: the name under which the leader holds the lease, ``host#…``.
    """

    def __init__(self, store: Store, holder: str) -> None:
        self._store = store
        self._host = holder.partition("#")[0]
        self._published: Breaker | None = None
        """The open breaker whose alert this leader has published last."""
        self._problem = ""
        """Why the latest alert could not be published."""

    async def look(self, view: ClusterView, rules: BreakerRules) -> ClusterView:
        """``view``, with the breaker opened if ``rules`` require it.

        Raises:
            StoreUnavailable: the breaker could not be opened; nothing may be decided on ``view``.
        """
        breaker = view.breaker
        if not breaker.open:
            self._problem = ""
            if (reason := tripped(view, rules)) is None:
                return view
            breaker = Breaker(open=True, reason=reason, at=time.time())
            await self._store.set_breaker(breaker)
            log.error("circuit breaker opened, policies move no rank", reason=reason)
        if breaker != self._published:
            # A former leader may have failed before its alert. The store takes each only once.
            await self._publish(breaker)
        return structs.replace(view, breaker=breaker)

    async def _publish(self, breaker: Breaker) -> None:
        """Publish the alert of an open breaker. A failure is only logged: the leader must still
        replace lost workers."""
        try:
            await self._store.publish_alert(
                breaker_alert(breaker, self._host, opened_at=breaker.at)
            )
        except StoreUnavailable as error:
            if (problem := str(error)) != self._problem:
                log.warning("the alert of the circuit breaker is not published", error=problem)
            self._problem = problem
        else:
            self._published, self._problem = breaker, ""


async def end_pause(store: Store, by: str, host: str) -> bool:
    """End a pause and close the circuit breaker; returns whether the breaker was open.

    ``host``: the host that the alert names.
    """
    view = await store.snapshot()
    before = view.breaker
    if before.open:
        # Findings and plans since then count again. An operator's clock may be wrong. That of Redis
        # may be a little behind those of the hosts, whose findings have opened the breaker.
        clock = await store.clock()
        at = max(clock, min(before.at, clock + CLOCK_SKEW_S))
        breaker = Breaker(open=False, reason=before.reason, at=at, by=by, counted=ahead(view, at))
        # The alert first: if the store fails in between, the breaker is still open, and the next
        # `tmd resume` does both.
        await store.publish_alert(breaker_alert(breaker, host, opened_at=before.at))
        await store.set_breaker(breaker)
    await store.set_paused(False)
    return before.open


def breaker_alert(breaker: Breaker, host: str, *, opened_at: float) -> Alert:
    """The alert, from ``host``, that the breaker was opened or closed. Both have the id of
    ``opened_at``."""
    opened = f"circuit breaker opened: {breaker.reason}; 'tmd resume' closes it"
    closed = f"circuit breaker closed by {breaker.by or 'unknown'}: {breaker.reason}"
    return Alert(
        id=f"breaker-{opened_at:.3f}",
        host=host,
        detector="leader",
        code=OPEN,
        entity="cluster",
        severity=Severity.DEGRADED,
        state=State.RAISED if breaker.open else State.CLEARED,
        message=opened if breaker.open else closed,
        job="",
        strategy=Strategy.ADVISE,
        count=1,
        at=breaker.at,
    )
