"""Detectors under supervision: signals in, alerts out.

Each detector runs in a task of its own. One that raises, ends or breaks its promise to stay alive
is started again after a growing pause, and that is itself a finding (``detector.failed``).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import structlog

from tmd.core import triage
from tmd.core.errors import StoreUnavailable
from tmd.core.findings import AT_ONCE, Origin, Rules
from tmd.core.model import Alert, Severity, Signal, State, Strategy
from tmd.core.requests import HealthyRequest
from tmd.daemon.bus import Bell, Reach, Store
from tmd.daemon.plugins import LoadedDetector
from tmd.daemon.roster import Roster
from tmd.plugin import DetectorConfig, WorkerEvent

log = structlog.get_logger("tmd.watcher")

ALERTS_WAITING = 10_000
"""Kept while the store is away; beyond, the oldest go first."""
RESTART_S = (1.0, 60.0)
PROBATION_S = 10.0
"""A detector that has run for so long again is not failed any more."""
FAILED = "detector.failed"
REPEAT_S = 0.5
LATE_S = 0.5
"""A turn of the loop that is later than this means that the daemon itself stood still."""


class Context:
    """Implements :class:`tmd.plugin.DetectorContext`; notes when the detector was last alive."""

    def __init__(self, host: str, loaded: LoadedDetector, roster: Roster) -> None:
        self._host = host
        self._loaded = loaded
        self._roster = roster
        self.alive_at = self.now()
        self.waiting = False
        """Inside a call of ours: it is we that let it wait."""

    @property
    def host(self) -> str:
        return self._host

    @property
    def config(self) -> DetectorConfig:
        return self._loaded.config

    @property
    def state_dir(self) -> Path:
        return self._loaded.state_dir

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def beat(self) -> None:
        self.alive_at = self.now()

    async def sleep(self, seconds: float) -> None:
        self.waiting = True
        await asyncio.sleep(seconds)
        self.waiting = False
        self.beat()

    async def worker_events(self) -> AsyncIterator[WorkerEvent]:
        feed = self._roster.subscribe(self.now())
        try:
            while True:
                self.waiting = True
                event = await feed.take()
                self.waiting = False
                self.beat()
                yield event
        finally:
            self._roster.unsubscribe(feed)


class Watcher:
    """Owns the detectors' tasks, the board of findings and the alerts that wait to be published."""

    def __init__(
        self,
        host: str,
        incarnation: str,
        detectors: list[LoadedDetector],
        roster: Roster,
        store: Store,
        reach: Reach,
    ) -> None:
        self.board = triage.Board()
        self._host = host
        self._incarnation = incarnation
        self._detectors = detectors
        self._roster = roster
        self._store = store
        self._reach = reach
        self._outbox: deque[Alert] = deque(maxlen=ALERTS_WAITING)
        self._posted = Bell()
        self._count = 0

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._publish(), name="alerts")
            tasks.create_task(self._repeat(), name="worker events")
            for loaded in self._detectors:
                why_not = loaded.detector.supported()
                if why_not is not None:
                    log.info("detector not used", detector=loaded.origin.name, reason=why_not)
                    continue
                tasks.create_task(self._supervise(loaded), name=f"detector {loaded.origin.name}")

    def fold(
        self,
        signal: Signal,
        detector: str,
        strategy: Strategy,
        rules: Rules = AT_ONCE,
    ) -> None:
        """Take in one signal."""
        self._count += 1
        origin = Origin(self._host, detector, strategy, rules)
        alert_id = f"{self._host}-{self._incarnation}-{self._count}"
        clock = asyncio.get_running_loop().time()
        self._note(
            *triage.fold(
                self.board, signal, origin, alert_id=alert_id, now=time.time(), clock=clock
            )
        )

    def declare_healthy(self, request: HealthyRequest) -> None:
        """Take in an operator's word."""
        self._note(
            *triage.declared_healthy(
                self.board,
                self._host,
                request.code,
                by=request.by,
                request=request.id,
                now=time.time(),
            )
        )

    def _note(self, board: triage.Board, news: triage.News) -> None:
        self.board = board
        for alert in news:
            log.warning(
                "alert",
                code=alert.code,
                entity=alert.entity,
                state=alert.state.value,
                severity=alert.severity.value,
                message=alert.message,
            )
            self._outbox.append(alert)
        if news:
            self._posted.ring()
            self._roster.urgent.ring()

    # --- detectors --------------------------------------------------------------------------------

    async def _supervise(self, loaded: LoadedDetector) -> None:
        pause = RESTART_S[0]
        while True:
            started = asyncio.get_running_loop().time()
            try:
                await self._watch(loaded)
                problem = "ended, though it should watch for ever"
            except Exception as error:
                # Whatever a foreign detector raises is contained here.
                log.exception("detector failed", detector=loaded.origin.name)
                problem = f"{type(error).__name__}: {error}"
            if asyncio.get_running_loop().time() - started > RESTART_S[1]:
                pause = RESTART_S[0]
            self._report_failure(loaded, problem)
            await asyncio.sleep(pause)
            pause = min(2 * pause, RESTART_S[1])

    async def _watch(self, loaded: LoadedDetector) -> None:
        """Run the detector until it ends, raises or falls silent."""
        loaded.state_dir.mkdir(parents=True, exist_ok=True)
        context = Context(self._host, loaded, self._roster)
        async with asyncio.timeout(None) as limit:
            recovery = asyncio.get_running_loop().call_later(PROBATION_S, self._recovered, loaded)
            keeper = None
            if loaded.detector.deadline_s is not None:
                keeper = asyncio.create_task(_keep(context, loaded.detector.deadline_s, limit))
            try:
                async with aclosing(loaded.detector.watch(context)) as signals:  # type: ignore[type-var]
                    async for signal in signals:
                        context.beat()
                        self.fold(signal, loaded.origin.name, loaded.strategy, loaded.rules)
            finally:
                recovery.cancel()
                if keeper is not None:
                    keeper.cancel()

    def _report_failure(self, loaded: LoadedDetector, problem: str) -> None:
        self.fold(_failure(loaded, State.RAISED, problem), "watcher", Strategy.ADVISE)

    def _recovered(self, loaded: LoadedDetector) -> None:
        self.fold(_failure(loaded, State.CLEARED, ""), "watcher", Strategy.ADVISE)

    # --- around them ------------------------------------------------------------------------------

    async def _publish(self) -> None:
        while True:
            while self._outbox:
                try:
                    await self._store.publish_alert(self._outbox[0])
                except StoreUnavailable as error:
                    await self._reach.lost(error)
                    continue
                self._reach.answered()
                self._outbox.popleft()
            await self._posted.heard(60.0)

    async def _repeat(self) -> None:
        """Tell the detectors how long each worker is silent, but never blame workers for us."""
        clock = asyncio.get_running_loop().time
        before = clock()
        while True:
            await asyncio.sleep(REPEAT_S)
            late = clock() - before - REPEAT_S
            if late > LATE_S:
                log.warning("the daemon stood still", seconds=round(late, 1))
                self._roster.excuse(late)
            before = clock()
            self._roster.repeat(before)
            if self.board.suspects:
                self._note(*triage.ripened(self.board, now=time.time(), clock=before))


async def _keep(context: Context, deadline_s: float, limit: asyncio.Timeout) -> None:
    """Let ``limit`` expire when the detector has not been alive for ``deadline_s``."""
    while True:
        await asyncio.sleep(deadline_s / 4)
        if not context.waiting and context.now() - context.alive_at > deadline_s:
            limit.reschedule(context.now())
            return


def _failure(loaded: LoadedDetector, state: State, problem: str) -> Signal:
    return Signal(
        code=FAILED,
        entity=f"detector:{loaded.origin.name}",
        severity=Severity.WARNING,
        state=state,
        message=problem,
    )
