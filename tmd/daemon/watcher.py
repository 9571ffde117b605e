"""Detectors under supervision: signals in, alerts out.

Each detector runs in a task of its own. One that raises, ends or breaks its promise to stay alive
is started again after a growing pause, and that is itself a finding (``detector.failed``).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import structlog

from tmd.core.alerts import triage
from tmd.core.alerts.findings import AT_ONCE, Origin, Rules
from tmd.core.alerts.injection import injector
from tmd.core.alerts.quota import BURST, PER_SECOND, Allowance
from tmd.core.alerts.reconfiguration import farewells, with_strategy
from tmd.core.alerts.store_health import StoreLoop
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.model import Alert, Severity, Signal, State, Strategy
from tmd.core.values.reasons import in_words
from tmd.core.values.requests import HealthyRequest
from tmd.daemon.bus import Store, WakeEvent
from tmd.daemon.journal import Journal
from tmd.daemon.plugins import LoadedDetector
from tmd.daemon.roster import Roster
from tmd.daemon.store_health import StoreHealth
from tmd.plugin import DetectorConfig, WorkerEvent

log = structlog.get_logger("tmd.watcher")

UNWRITTEN = 10_000
"""On their way to the journal; beyond, the oldest go first."""
BATCH = 100
RESTART_S = (1.0, 60.0)
ASK_S = 10.0
"""So often a detector that cannot work on this host is asked again."""
PROBATION_S = 10.0
"""A detector that has run for so long again is not failed any more."""
FAILED = "detector.failed"
STOP_S = 5.0
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


class Watched:
    """A detector and its task, while there is one."""

    def __init__(self, loaded: LoadedDetector) -> None:
        self.loaded = loaded
        self.strategy = loaded.strategy
        """May change while it runs."""
        self.task: asyncio.Task[None] | None = None
        self.allowance = Allowance(BURST, PER_SECOND)


class Watcher:
    """Owns the detectors' tasks, the board of findings and the alerts that wait to be published."""

    def __init__(
        self,
        host: str,
        incarnation: str,
        detectors: list[LoadedDetector],
        roster: Roster,
        store: Store,
        store_health: StoreHealth,
        journal: Journal,
    ) -> None:
        self.board = triage.Board()
        self.news: Counter[Severity] = Counter()
        self._host = host
        self._incarnation = incarnation
        self._watched = {loaded.origin.name: Watched(loaded) for loaded in detectors}
        self._tasks = asyncio.TaskGroup()
        self._roster = roster
        self._store = store
        self._store_health = store_health
        self._journal = journal
        self._unwritten: deque[Alert] = deque(maxlen=UNWRITTEN)
        self.posted = WakeEvent()
        """Rung when there may be something to publish."""
        self._count = 0

    async def run(self) -> None:
        """Until cancelled."""
        async with self._tasks as tasks:
            tasks.create_task(self._publish(), name="alerts")
            tasks.create_task(self._repeat(), name="worker events")
            for watched in self._watched.values():
                self._start(watched)

    async def adopt(self, detectors: list[LoadedDetector]) -> list[str]:
        """While it runs: watch with these. Only detectors with another configuration are started
        anew; returns their names. What one that is not wanted any more has raised is cleared."""
        wanted = {loaded.origin.name: loaded for loaded in detectors}
        restarted = []
        for name in [n for n in self._watched if n not in wanted]:
            if await self._stop(self._watched[name]):
                del self._watched[name]
                self._forget(name)
        for name, loaded in wanted.items():
            watched = self._watched.get(name)
            if watched is None:
                self._watched[name] = watched = Watched(loaded)
            elif watched.loaded.config == loaded.config:
                watched.strategy = loaded.strategy
                self.board = with_strategy(self.board, name, loaded.strategy)
                continue
            elif not await self._stop(watched):
                continue
            watched.loaded, watched.strategy = loaded, loaded.strategy
            self.board = with_strategy(self.board, name, loaded.strategy)
            self._start(watched)
            restarted.append(name)
        self._roster.urgent.ring()
        return restarted

    def _start(self, watched: Watched) -> None:
        name = f"detector {watched.loaded.origin.name}"
        watched.task = self._tasks.create_task(self._supervise(watched), name=name)

    async def _stop(self, watched: Watched) -> bool:
        """Whether it has ended: two of a kind at once would contradict each other."""
        if watched.task is None:
            return True
        watched.task.cancel()
        await asyncio.wait([watched.task], timeout=STOP_S)
        if watched.task.done():
            watched.task = None
            return True
        log.warning("detector does not end, it is left alone", detector=watched.loaded.origin.name)
        return False

    def _forget(self, name: str) -> None:
        for whose in (name, injector(name)):
            for signal in farewells(self.board, whose, "the detector was switched off"):
                self.fold(signal, whose, Strategy.OBSERVE)
        for alert in self.board.alerts:
            if alert.code == FAILED and alert.entity == f"detector:{name}":
                cleared = Signal(FAILED, alert.entity, alert.severity, State.CLEARED)
                self.fold(cleared, "watcher", Strategy.ADVISE)

    def fold(
        self,
        signal: Signal,
        detector: str,
        strategy: Strategy,
        rules: Rules = AT_ONCE,
    ) -> bool:
        """Take in one signal; whether it was news."""
        self._count += 1
        origin = Origin(self._host, detector, strategy, rules)
        own = f"{self._incarnation}-{self._count}"
        if signal.event:
            own = f"{detector}-{signal.code}-{signal.event}"
        alert_id = f"{self._host}-{own}"
        clock = asyncio.get_running_loop().time()
        board, news = triage.fold(
            self.board, signal, origin, alert_id=alert_id, now=time.time(), clock=clock
        )
        self._note(board, news)
        return bool(news)

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

    def terms(self) -> dict[str, tuple[Strategy, Rules]]:
        """How far findings of each enabled detector go, and when they count."""
        return {name: (w.strategy, w.loaded.rules) for name, w in self._watched.items()}

    def _note(self, board: triage.Board, news: triage.News) -> None:
        self.board = board
        self.tell(news)

    def tell(self, news: triage.News) -> None:
        """Log, write down and publish."""
        for alert in news:
            log.warning(
                "alert",
                code=alert.code,
                entity=alert.entity,
                state=alert.state.value,
                severity=alert.severity.value,
                message=alert.message,
            )
            self.news[alert.severity] += 1
            self._unwritten.append(alert)
        if news:
            self.posted.ring()
            self._roster.urgent.ring()

    # --- detectors --------------------------------------------------------------------------------

    async def _supervise(self, watched: Watched) -> None:
        loaded = watched.loaded
        pause = RESTART_S[0]
        while True:
            started = asyncio.get_running_loop().time()
            try:
                await _supported(loaded)
                await self._watch(watched)
                problem = "ended, though it should watch for ever"
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                problem = "let a cancellation of its own out"
            except Exception as error:
                # Whatever a foreign detector raises is contained here.
                log.exception("detector failed", detector=loaded.origin.name)
                problem = f"{type(error).__name__}: {in_words(error)}"
            if asyncio.get_running_loop().time() - started > RESTART_S[1]:
                pause = RESTART_S[0]
            self._report_failure(loaded, problem)
            await asyncio.sleep(pause)
            pause = min(2 * pause, RESTART_S[1])

    async def _watch(self, watched: Watched) -> None:
        """Run the detector until it ends, raises or falls silent."""
        loaded = watched.loaded
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
                        news = self.fold(signal, loaded.origin.name, watched.strategy, loaded.rules)
                        if news and signal.state is State.CLEARED:
                            # Who only states waits for nothing; who flaps must end things, too.
                            watched.allowance = watched.allowance.spent(context.now())
                            await context.sleep(watched.allowance.owed_s)
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
        """From the journal to the store, in order."""
        try:
            while True:
                await self._write()
                try:
                    await self._replay_if_lost()
                    while await self._publish_batch():
                        await self._write()
                    self._store_health.worked(StoreLoop.ALERTS)
                except StoreUnavailable as error:
                    await self._write()
                    await self._store_health.failed(StoreLoop.ALERTS, error)
                    continue
                await self.posted.heard(60.0)
        finally:
            await self._write()

    async def _write(self) -> None:
        """Everything goes to the journal first, also while the store is away."""
        if self._unwritten:
            alerts = tuple(self._unwritten)
            self._unwritten.clear()
            await self._journal.add(alerts)

    async def _replay_if_lost(self) -> None:
        """A store that lacks our last word has been emptied: it is told all again."""
        last = await self._journal.last_published()
        if last is None:
            return
        if not await self._store.holds_alert(last):
            log.warning("the store has lost alerts, they are published again")
            await self._journal.forget_published()

    async def _publish_batch(self) -> bool:
        """Whether there was something to publish."""
        batch = await self._journal.waiting(BATCH)
        taken = []
        try:
            for number, alert in batch:
                await self._store.publish_alert(alert)
                taken.append(number)
        finally:
            # Marked only after the store took it; one marked too late is ignored by the store.
            if taken:
                await self._journal.published(taken)
        return bool(batch)

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


async def _supported(loaded: LoadedDetector) -> None:
    """Until the detector can work on this host: a driver or a log may come after the daemon."""
    told = ""
    while (reason := loaded.why_not()) is not None:
        if reason != told:
            log.info("detector not used", detector=loaded.origin.name, reason=reason)
        told = reason
        await asyncio.sleep(ASK_S)


async def _keep(context: Context, deadline_s: float, limit: asyncio.Timeout) -> None:
    """Let ``limit`` expire when the detector has not been alive for ``deadline_s``."""
    while True:
        await asyncio.sleep(deadline_s / 4)
        if not context.waiting and context.now() - context.alive_at > deadline_s:
            limit.reschedule(context.now())
            return


def _failure(loaded: LoadedDetector, state: State, problem: str) -> Signal:
    entity = f"detector:{loaded.origin.name}"
    return Signal(FAILED, entity, Severity.WARNING, state, problem)
