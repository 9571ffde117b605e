"""The webhook: the leader POSTs alerts and finished migrations.

It records in the store what it has announced, so a new leader repeats at most the last notice of
its predecessor. A notice that is repeated has the same id. Nothing waits for the webhook.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog
from msgspec import Struct

from tmd.core.alerts.notices import Announced, Notice, of_alerts, of_migrations, payload
from tmd.core.alerts.store_health import StoreLoop
from tmd.core.values.errors import StoreUnavailable
from tmd.daemon.bus import Store
from tmd.daemon.candidate import Candidate
from tmd.daemon.store_health import StoreHealth
from tmd.schema import Secret

if TYPE_CHECKING:
    from aiohttp import ClientSession

log = structlog.get_logger("tmd.webhook")

BATCH = 100
SKEW_S = 60.0
"""An outage is taken to begin this much earlier: clocks differ, and the last announcements before
it may be lost. What is repeated has the same id."""
REPLAY_S = 300.0
"""For this long after an outage the hosts may publish again what they published before it."""
MAY_PASS = frozenset({408, 425, 429})
"""Besides 5xx: status codes after which the same request may succeed."""


class WebhookConfig(Struct, frozen=True):
    cluster: str
    url: Secret
    headers: Mapping[str, Secret]
    alerts: bool
    migrations: bool
    timeout_s: float
    attempts: int = 6
    first_pause_s: float = 1.0
    """Doubled after each failure, with jitter."""
    poll_s: float = 1.0


class Webhook:
    """One per daemon; silent unless this daemon leads."""

    def __init__(
        self, config: WebhookConfig, candidate: Candidate, store: Store, store_health: StoreHealth
    ) -> None:
        self._config = config
        self._candidate = candidate
        self._store = store
        self._store_health = store_health
        self._announced: Announced | None = None
        """What has been announced, as far as this leader knows; ``None`` unless it is current."""
        self._stored: Announced | None = None
        """The same, as this daemon has last read it or stored it."""
        self._epoch = 0
        """The lease epoch of the present turn."""
        self._past: tuple[float, float] | None = None
        """(wall clock, monotonic): notices before the first time are skipped until the second."""

    async def run(self) -> None:
        """Run until cancelled."""
        while not self._candidate.leading:  # noqa: ASYNC110 - the event of an election is the leader's
            await asyncio.sleep(self._config.poll_s)
        # Only the leader needs the client: it costs a daemon memory and start-up time.
        from aiohttp import ClientSession, ClientTimeout, DummyCookieJar

        config = self._config
        headers = {name: value.reveal() for name, value in config.headers.items()}
        async with ClientSession(
            timeout=ClientTimeout(total=config.timeout_s),
            headers={**headers, "Content-Type": "application/json"},
            cookie_jar=DummyCookieJar(),
        ) as session:
            while True:
                try:
                    more = self._candidate.leading and await self._turn(session)
                except StoreUnavailable as error:
                    await self._store_health.failed(StoreLoop.WEBHOOK, error)
                    continue
                if not self._candidate.leading:
                    self._store_health.worked(StoreLoop.WEBHOOK)
                    if not self._store_health.state.down:
                        self._announced = self._stored = None  # another leader may store more
                if not more:
                    await asyncio.sleep(config.poll_s)

    async def _turn(self, session: ClientSession) -> bool:
        """Announce what is new; return whether there may be more."""
        self._epoch = self._candidate.lease.epoch
        announced = await self._known()
        found = await self._store.alerts(announced.cursor, limit=BATCH)
        alerts = of_alerts(a for _, a in found) if self._config.alerts else []
        cursors = {id(alert): cursor for cursor, alert in found}
        ended = of_migrations((await self._store.jobs()).records) if self._config.migrations else []
        shown = [notice.id for notice in ended]
        self._store_health.worked(StoreLoop.WEBHOOK)
        if past := [notice for notice in announced.unannounced(ended) if self._is_past(notice)]:
            announced = await self._remember(announced.plus(past, announced.cursor, shown))
        for notice in announced.unannounced([*alerts, *ended]):
            if self._is_past(notice):
                continue
            if not await self._deliver(session, notice):
                return False
            cursor = cursors.get(id(notice.alert), announced.cursor)
            announced = await self._remember(announced.plus([notice], cursor, shown))
            if not self._leads_on:
                return True  # what another leader has announced meanwhile is read first
        if found and announced.cursor != found[-1][0]:
            await self._remember(announced.plus([], found[-1][0], shown))
        return len(found) == BATCH

    @property
    def _leads_on(self) -> bool:
        """Whether this daemon has led since the turn began."""
        return self._candidate.leading and self._candidate.lease.epoch == self._epoch

    async def _known(self) -> Announced:
        """What was announced. A cluster without announcements skips its past.

        A store that has come back empty has no announcements. A leader that also led before the
        outage remembers them. Another one announces what has happened since the outage began, and
        not what the hosts publish again.
        """
        stored = await self._store.announced()
        if stored is not None and stored != self._stored:
            self._announced = self._stored = stored
        if self._announced is None:
            return await self._remember(await self._begun())
        if stored is None and self._stored is not None:
            # It has come back empty, and the hosts publish again.
            self._past = await self._outage(before=self._announced.cursor) or self._past
        if stored != self._announced:  # or the last write failed
            return await self._remember(self._announced)
        return self._announced

    async def _begun(self) -> Announced:
        self._past = await self._outage()
        if self._past is not None:
            return Announced()
        ended = of_migrations((await self._store.jobs()).records)
        shown = [notice.id for notice in ended]
        return Announced().plus(ended, await self._store.newest_alert(), shown)

    async def _outage(self, before: str = "") -> tuple[float, float] | None:
        """Two times for :attr:`_past`; ``None`` if nothing is to be skipped.

        The first is the start of the outage, or the time of the alert at cursor ``before`` if that
        is earlier: a store may be emptied without an outage. It is by the clock of the store, since
        that of this host may be wrong.
        """
        outage_s = self._store_health.outage_age_s(REPLAY_S)
        if outage_s is None and not before:
            return None
        began = await self._store.clock() - (outage_s or 0.0)
        if before:
            began = min(began, int(before.partition("-")[0]) / 1000)
        return began - SKEW_S, time.monotonic() + REPLAY_S

    def _is_past(self, notice: Notice) -> bool:
        if self._past is None:
            return False
        before, until = self._past
        return time.monotonic() < until and notice.at < before

    async def _remember(self, announced: Announced) -> Announced:
        self._announced = announced
        if self._leads_on:  # otherwise another leader may have stored more
            await self._store.put_announced(announced)
            self._stored = announced
        return announced

    async def _deliver(self, session: ClientSession, notice: Notice) -> bool:
        """Send with retries. True: the notice is done, delivered or given up."""
        body = payload(notice, self._config.cluster)
        pause = self._config.first_pause_s
        problem = ""
        for attempt in range(self._config.attempts):
            if attempt:
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause *= 2
            if not self._leads_on:
                return False
            problem, may_pass = await self._post(session, body)
            if not problem:
                return True
            log.info("webhook failed", notice=notice.id, attempt=attempt + 1, problem=problem)
            if not may_pass:
                break
        log.warning("webhook gave up on a notice", notice=notice.id, problem=problem)
        return True

    async def _post(self, session: ClientSession, body: bytes) -> tuple[str, bool]:
        """The error, without the URL, which is secret; and whether it may be temporary."""
        from aiohttp import ClientError

        try:
            # Redirects are not followed: the headers would reach another server.
            async with session.post(
                self._config.url.reveal(), data=body, allow_redirects=False
            ) as answer:
                if 200 <= answer.status < 300:
                    return "", False
                return f"HTTP {answer.status}", answer.status in MAY_PASS or answer.status >= 500
        except (ClientError, OSError, ValueError) as error:  # TimeoutError is an OSError
            return type(error).__name__, True
