"""Holds the leader's lease for as long as it can, and gives it back."""

from __future__ import annotations

import asyncio
import random

import structlog
from msgspec import Struct

from tmd.core.alerts.breaker import BreakerRules
from tmd.core.alerts.store_health import StoreLoop
from tmd.core.planning.election import Answer, GivingWay, Granted, Lease, next_attempt, updated
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.limits import PlanLimits, ShadowGoals
from tmd.core.values.reasons import in_words
from tmd.daemon.bus import Store, WakeEvent
from tmd.daemon.records import Records
from tmd.daemon.store_health import StoreHealth

log = structlog.get_logger("tmd.leader")

SHORTEST_REST_S = 0.001
"""A shorter rest may round to nothing, and this host would ask again at once."""


class LeaderConfig(Struct, frozen=True):
    holder: str
    """Unique name of this candidate: host and incarnation."""
    ttl_s: float
    renew_s: float
    poll_s: float
    limits: PlanLimits
    shadow_goals: ShadowGoals = ShadowGoals()
    breaker: BreakerRules = BreakerRules()
    may_lead: bool = True
    list_ended_s: float = 0.0
    """For how long an ended job stays on the list; 0: for ever."""


class Candidate:
    """Keeps the lease for as long as it can. ``lease`` is what this process may assume."""

    def __init__(
        self, store: Store, config: LeaderConfig, records: Records, store_health: StoreHealth
    ) -> None:
        self.lease = Lease()
        self.elected = WakeEvent()
        self.vacant = WakeEvent()
        """Rings when the leader stepped down."""
        self._store = store
        self._config = config
        self.records = records
        self._store_health = store_health
        self._led = False
        self._asking = False
        """Whether a lease may have been granted whose answer has not come."""
        self._way = GivingWay()

    @property
    def holder(self) -> str:
        """The name under which it holds the lease."""
        return self._config.holder

    @property
    def unreplicated(self) -> str:
        """Why the lease may be lost if Redis fails over; empty if it is not."""
        return self._store.unreplicated

    @property
    def leading(self) -> bool:
        return self.lease.held(asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Run until cancelled, then give the lease back."""
        try:
            while True:
                if (rest := self._way.rest(asyncio.get_running_loop().time())) > 0:
                    await self._abstain(rest)
                    continue
                answer = await self._ask()
                if self._way.rest(asyncio.get_running_loop().time()) > 0:
                    await self.step_down()  # it was asked for before, and granted since
                    continue
                await self.vacant.wait(self._pause(answer))
        finally:
            await asyncio.shield(self.step_down())

    def _pause(self, answer: Answer | None) -> float:
        """Seconds until it asks again."""
        renew_s = self._config.renew_s
        return next_attempt(answer, renew_s=renew_s, chance=random.random(), leads=self.leading)

    async def _abstain(self, rest: float) -> None:
        """Wait a part of ``rest``, and look whether another one leads."""
        await asyncio.sleep(max(SHORTEST_REST_S, min(rest, self._config.renew_s)))
        try:
            leader = await self._store.leader()
        except StoreUnavailable as error:
            await self._store_health.failed(StoreLoop.LEASE, error)
            return
        self._store_health.worked(StoreLoop.LEASE)
        now = asyncio.get_running_loop().time()
        self._way = self._way.saw(leader, now, self._config.ttl_s)

    async def _ask(self) -> Answer | None:
        config = self._config
        sent_at = asyncio.get_running_loop().time()
        floor = max(self.records.obeyed, self.lease.epoch)
        self._asking = True
        try:
            answer = await self._store.acquire(config.holder, ttl_s=config.ttl_s, floor=floor)
        except StoreUnavailable as error:
            await self._store_health.failed(StoreLoop.LEASE, error)
            self._note(self.leading)
            return None
        self._asking = False
        self._store_health.worked(StoreLoop.LEASE)
        self.lease = updated(self.lease, answer, sent_at=sent_at, ttl_s=config.ttl_s)
        self._way = self._way.after(answer)
        self._note(isinstance(answer, Granted))
        return answer

    def _note(self, leading: bool) -> None:
        if leading and not self._led:
            log.info("leading", lease_epoch=self.lease.epoch)
            self.elected.ring()
        elif self._led and not leading:
            log.warning("no longer leading", lease_epoch=self.lease.epoch)
        self._led = leading

    def give_way_to(self, hosts: frozenset[str]) -> bool:
        """Returns whether this candidate must step down for ``hosts``: once, until one of them
        leads."""
        now = asyncio.get_running_loop().time()
        self._way, gives = self._way.to(hosts, now, self._config.ttl_s)
        return gives

    async def step_down(self, fence: int = 0) -> None:
        """Stop leading. The next lease that this host takes has an epoch above ``fence``."""
        led, self._led = self._led, False
        self.lease = Lease(epoch=max(self.lease.epoch, fence))
        if not (led or self._asking):
            return
        try:
            async with asyncio.timeout(1.0):
                await self._store.release(self._config.holder)
            if led:
                log.info("lease released")
        except (StoreUnavailable, TimeoutError) as error:
            log.warning("lease not released, it will expire", error=in_words(error))
