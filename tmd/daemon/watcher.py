"""Supervises detectors: signals in, alerts out.

Each detector runs in its own task. One that raises, ends or misses its liveness deadline is
restarted after a growing pause, and that itself is a finding (``detector.failed``).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

import structlog

from tmd.core.alerts import triage
from tmd.core.alerts.findings import AT_ONCE, FindingRules, Origin
from tmd.core.alerts.injection import injector
from tmd.core.alerts.reconfiguration import farewells, lesser, with_strategy
from tmd.core.alerts.store_health import StoreLoop
from tmd.core.values.errors import StoreUnavailable
from tmd.core.values.model import Alert, Signal, State, Strategy
from tmd.core.values.reasons import in_words
from tmd.core.values.requests import HealthyRequest
from tmd.daemon.bus import Store, WakeEvent
from tmd.daemon.counters import AlertCounter
from tmd.daemon.detector_run import (
    FAILED,
    STOP_S,
    Context,
    DetectorRun,
    StopRequest,
    WatchedDetector,
    supported,
)
from tmd.daemon.foreign_code import contained_exit, timed_code
from tmd.daemon.journal import Journal
from tmd.daemon.plugins import LoadedDetector
from tmd.daemon.roster import Roster
from tmd.daemon.store_health import StoreHealth

log = structlog.get_logger("tmd.watcher")

BATCH = 100
RESTART_S = (1.0, 60.0)
GIVE_UP_S = STOP_S + 1.0
"""How long a reload waits for a detector that is to end."""
REPEAT_S = 0.5
LATE_S = 0.5
"""A turn of the loop later than this means that the daemon itself was not running."""


class AlertSinks(NamedTuple):
    """Where alerts go."""

    store: Store
    store_health: StoreHealth
    journal: Journal
    unwritten: int = 10_000
    """Most alerts that wait to be written into the journal. Beyond it, the oldest are dropped."""


class Watcher:
    """Owns the detectors' tasks, the board of findings and the alerts waiting to be published."""

    def __init__(
        self,
        host: str,
        incarnation: str,
        detectors: list[LoadedDetector],
        roster: Roster,
        sinks: AlertSinks,
    ) -> None:
        self.board = triage.FindingsBoard()
        self.counter = AlertCounter()
        self._host = host
        self._incarnation = incarnation
        self._watched = {each.origin.name: self._new(each) for each in detectors}
        self._tasks = asyncio.TaskGroup()
        self._roster = roster
        self._store, self._store_health, self._journal, unwritten = sinks
        self._unwritten: deque[Alert] = deque(maxlen=unwritten)
        self.posted = WakeEvent()
        """Rings when there may be alerts to publish."""
        self._count = 0
        self._ending = False

    async def run(self) -> None:
        """Run until cancelled. A detector that does not stop then is abandoned after ``STOP_S``."""
        async with self._tasks as tasks:
            tasks.create_task(self._publish(), name="alerts")
            tasks.create_task(self._repeat(), name="worker events")
            for watched in self._watched.values():
                self._start(watched, watched.loaded)
            try:
                await asyncio.Event().wait()
            finally:
                self._ending = True

    async def adopt(self, detectors: list[LoadedDetector]) -> list[str]:
        """Replace the detectors at runtime. Only those whose configuration changed are restarted;
        return their names. The findings of removed detectors are cleared."""
        wanted = {loaded.origin.name: loaded for loaded in detectors}
        restarted = []
        for name, watched in list(self._watched.items()):
            if name in wanted or self._watched.get(name) is not watched:
                continue  # it stays, or has ended meanwhile
            if await self._stop(watched, None):
                self._remove(watched)
            else:
                self._take(watched, Strategy.OBSERVE, watched.rules)
        for name, loaded in wanted.items():
            if (known := self._watched.get(name)) is not None:
                same = known.loaded.config == loaded.config
                if same and known.request is not StopRequest.OVERDUE:
                    self._take(known, loaded.strategy, loaded.rules)
                    continue
                if not await self._stop(known, loaded):
                    # A new permission is meant for the new configuration, which does not run yet.
                    self._take(known, lesser(loaded.strategy, known.strategy), known.rules)
                    continue
            self._watched[name] = known = known or self._new(loaded)
            self._start(known, loaded)
            restarted.append(name)
        self._roster.urgent.ring()
        return restarted

    def _new(self, loaded: LoadedDetector) -> WatchedDetector:
        def report(found: Signal) -> None:
            self.fold(found, "watcher", Strategy.ADVISE)

        return WatchedDetector(loaded, report)

    def _start(self, watched: WatchedDetector, loaded: LoadedDetector) -> None:
        watched.loaded, watched.request = loaded, StopRequest.NONE
        self._take(watched, loaded.strategy, loaded.rules)
        name = f"detector {loaded.origin.name}"
        watched.task = self._tasks.create_task(self._supervise(watched), name=name)

    def _take(self, watched: WatchedDetector, strategy: Strategy, rules: FindingRules) -> None:
        """Let ``strategy`` apply, also to findings that are there, and ``rules`` from now on."""
        watched.strategy, watched.rules = strategy, rules
        self.board = with_strategy(self.board, watched.loaded.origin.name, strategy)

    def _remove(self, watched: WatchedDetector) -> None:
        name = watched.loaded.origin.name
        if self._watched.get(name) is watched:  # it may have ended while it was waited for
            del self._watched[name]
            watched.conduct.ends()
            self._forget(name)

    async def _stop(self, watched: WatchedDetector, successor: LoadedDetector | None) -> bool:
        """Return whether it has ended: two instances at once would contradict each other. If not,
        ``successor`` is started once it has."""
        if (task := watched.task) is None:
            return True
        watched.request = StopRequest.AWAITED  # an earlier successor is not wanted any more
        task.cancel()
        # Longer than the task itself waits for the detector: it decides first.
        await asyncio.wait([task], timeout=GIVE_UP_S)
        if task.done():
            watched.task = None
            return True
        watched.request, watched.successor = StopRequest.OVERDUE, successor
        log.warning("detector does not stop, it keeps running", detector=watched.loaded.origin.name)
        return False

    def _succeed(self, watched: WatchedDetector) -> None:
        """A detector that did not stop in time has ended."""
        if self._ending:
            return
        if watched.successor is None:
            self._remove(watched)
        else:
            self._start(watched, watched.successor)
        self._roster.urgent.ring()

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
        rules: FindingRules = AT_ONCE,
    ) -> bool:
        """Take in one signal; return whether it was news."""
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
        """Take in an operator's request. A detector whose findings are newer than the request keeps
        what it remembers of them."""
        now = time.time()
        board, news = triage.declared_healthy(self.board, request, now)
        self._note(board, news)
        newer = {key.detector for key in triage.newer(board, request, now)}
        call = "declared_healthy()"
        for name, watched in self._watched.items():
            if name in newer:
                continue
            try:
                with timed_code(partial(watched.conduct.blocked, call)), contained_exit():
                    watched.loaded.detector.declared_healthy(request.code)
            except Exception as error:  # contained, as whatever a detector raises
                log.exception("detector failed at 'tmd set-healthy'", detector=name)
                watched.conduct.blamed(f"{call} fails: {in_words(error)}")

    @property
    def without_result(self) -> list[str]:
        """Detectors that are not through their first look, so that nothing is known from them."""
        return [name for name, watched in self._watched.items() if watched.has_no_result]

    def terms(self) -> dict[str, tuple[Strategy, FindingRules]]:
        """The strategy of each enabled detector, and when its findings count."""
        return {name: (w.strategy, w.rules) for name, w in self._watched.items()}

    def _note(self, board: triage.FindingsBoard, news: triage.NewAlerts) -> None:
        self.board = board
        self.publish(news)

    def publish(self, news: triage.NewAlerts) -> None:
        """Log ``news`` and queue it for the journal and the store."""
        for alert in news:
            log.warning(
                "alert",
                code=alert.code,
                entity=alert.entity,
                state=alert.state.value,
                severity=alert.severity.value,
                message=alert.message,
            )
            self.counter.add(alert)
            self._unwritten.append(alert)
        if news:
            self.posted.ring()
            self._roster.urgent.ring()

    # --- detectors --------------------------------------------------------------------------------

    async def _supervise(self, watched: WatchedDetector) -> None:
        loaded = watched.loaded
        pause = RESTART_S[0]
        while True:
            started = asyncio.get_running_loop().time()
            try:
                await supported(loaded, watched.conduct.answered)
                await self._attend(watched)
                problem = "ended, although it should watch forever"
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                problem = "let its own cancellation escape"
            except Exception as error:
                # Whatever a detector raises is contained here.
                log.exception("detector failed", detector=loaded.origin.name)
                problem = f"{type(error).__name__}: {in_words(error)}"
            if watched.request is StopRequest.AWAITED:
                return
            if watched.request is StopRequest.OVERDUE:
                return self._succeed(watched)
            if asyncio.get_running_loop().time() - started > RESTART_S[1]:
                pause = RESTART_S[0]
            watched.conduct.failed(problem)
            await asyncio.sleep(pause)
            pause = min(2 * pause, RESTART_S[1])

    async def _attend(self, watched: WatchedDetector) -> None:
        """Run the detector until it ends, raises or falls silent."""
        loaded = watched.loaded
        loaded.state_dir.mkdir(parents=True, exist_ok=True)
        watched.context = context = Context(self._host, loaded, self._roster)
        conduct = watched.conduct
        conduct.begins()
        stuck = partial(conduct.failed, "missed its deadline and does not stop")
        blocked = partial(conduct.blocked, "watch()")
        begin = partial(self._watch, watched, context)
        run = DetectorRun(begin, context, loaded.detector.deadline_s, stuck, blocked)
        try:
            while True:
                try:
                    return await run.ended()
                except asyncio.CancelledError:
                    task = asyncio.current_task()
                    if task is None or not task.cancelling() or await run.stop():
                        raise
                    if self._ending:
                        log.warning(
                            "detector abandoned, as it does not stop", detector=loaded.origin.name
                        )
                        raise
                    task.uncancel()
        finally:
            conduct.ends()

    async def _watch(self, watched: WatchedDetector, context: Context) -> None:
        loaded = watched.loaded
        async with aclosing(loaded.detector.watch(context)) as signals:  # type: ignore[type-var]
            async for signal in signals:
                context.beat()
                news = self.fold(signal, loaded.origin.name, watched.strategy, watched.rules)
                if news and signal.state is State.CLEARED:
                    # Only after a clearing that is news: a finding that flaps is still cleared.
                    watched.allowance = watched.allowance.spent(context.now())
                    await context.sleep(watched.allowance.owed_s)

    # --- around them ------------------------------------------------------------------------------

    async def _publish(self) -> None:
        """Publish from the journal to the store, in order."""
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
                await self.posted.wait(60.0)
        finally:
            await self._write()

    async def _write(self) -> None:
        """Write everything to the journal first, also while the store is unavailable."""
        if self._unwritten:
            alerts = tuple(self._unwritten)
            self._unwritten.clear()
            await self._journal.add(alerts)

    async def _replay_if_lost(self) -> None:
        """Publish all alerts again if the store lacks the last one: it has lost its data."""
        last = await self._journal.last_published()
        if last is None:
            return
        if not await self._store.holds_alert(last):
            log.warning("the store has lost alerts, publishing them again")
            await self._journal.forget_published()

    async def _publish_batch(self) -> bool:
        """Return whether there was something to publish."""
        batch = await self._journal.waiting(BATCH)
        taken = []
        try:
            for number, alert in batch:
                await self._store.publish_alert(alert)
                taken.append(number)
        finally:
            # Marked only after the store accepted it; the store ignores a duplicate.
            if taken:
                await self._journal.published(taken)
        return bool(batch)

    async def _repeat(self) -> None:
        """Send the detectors each worker's time of silence, less the daemon's own stalls."""
        clock = asyncio.get_running_loop().time
        before = clock()
        while True:
            await asyncio.sleep(REPEAT_S)
            late = clock() - before - REPEAT_S
            if late > LATE_S:
                log.warning("the daemon was not running", seconds=round(late, 1))
                self._roster.excuse(late)
            before = clock()
            self._roster.repeat(before)
            if self.board.suspects or self.board.memory.stood:
                self._note(*triage.ripened(self.board, now=time.time(), clock=before))
