"""What a detector runs in: its context, its deadline, and how it is stopped."""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from tmd.core.alerts.quota import BURST, PER_SECOND, Allowance
from tmd.daemon.foreign_code import BLOCKS_S, contained_exit, timed_code
from tmd.daemon.plugins import LoadedDetector
from tmd.daemon.roster import Roster
from tmd.plugin import DetectorConfig, Severity, Signal, State, WorkerEvent

log = structlog.get_logger("tmd.watcher")

ASK_S, LONGEST_ASK_S = 10.0, 600.0
"""Shortest and longest pause before a detector that cannot run on this host is asked again."""
ASK_SHARE = 0.01
"""In between, it is asked so rarely that its answers take this share of the daemon's time."""
PROBATION_S = 10.0
"""A restarted detector that runs for this long has recovered."""
BLAMED_S = 60.0
"""One that goes on after it has blocked, or after a call of it has failed, has recovered then."""
FAILED = "detector.failed"
STOP_S = 5.0
"""Longest wait for a detector that is to end."""


class StopRequest(Enum):
    """What has come of the request that a detector stops."""

    NONE = "none"
    AWAITED = "awaited"
    """A reload waits for its end."""
    OVERDUE = "overdue"
    """It has not stopped in time."""


class WatchedDetector:
    """A detector and its task, if it runs."""

    def __init__(self, loaded: LoadedDetector, report: Callable[[Signal], None]) -> None:
        self.loaded = loaded
        self.strategy, self.rules = loaded.strategy, loaded.rules
        """May change while the detector runs."""
        self.task: asyncio.Task[None] | None = None
        self.request = StopRequest.NONE
        self.successor: LoadedDetector | None = None
        """What is started once an overdue one ends; ``None``: it was removed."""
        self.allowance = Allowance(BURST, PER_SECOND)
        self.context: Context | None = None
        """That of its present run, or of its last one."""
        self.conduct = Conduct(loaded.origin.name, report)

    @property
    def has_no_result(self) -> bool:
        """Whether it runs, says when it has looked, and has not yet."""
        if self.context is None or not self.loaded.detector.says_looked:
            return False
        return not self.context.has_looked


class Conduct:
    """The finding about a detector that fails: ``report`` gets it, and its end."""

    def __init__(self, name: str, report: Callable[[Signal], None]) -> None:
        self._name = name
        self._report = report
        self._recovery: asyncio.TimerHandle | None = None
        self._failed = False
        """Whether the finding stays until the detector runs, or answers, again."""

    def begins(self) -> None:
        """It runs."""
        self._recovers(PROBATION_S)

    def failed(self, problem: str) -> None:
        """It has ended, or does not stop."""
        self.ends()
        self._failed = True
        self._raise(problem)

    def ends(self) -> None:
        """Its run is over: it recovers no more."""
        if self._recovery is not None:
            self._recovery.cancel()

    def answered(self, took_s: float) -> None:
        """It has said whether it can run on this host. A failure before that is over."""
        self._recovers(0.0)
        if took_s > BLOCKS_S:
            self.blocked("supported()", took_s)
            self.ends()  # until it answers sooner, or runs

    def blocked(self, call: str, seconds: float) -> None:
        """``call`` has kept the event loop for so long."""
        rounded = round(seconds, 1)
        log.warning("detector blocks", detector=self._name, call=call, seconds=rounded)
        self.blamed(f"keeps the daemon from its work, last for {rounded} s: {call} blocks")

    def blamed(self, problem: str) -> None:
        """It goes on after ``problem``. The finding ends after a while without another one."""
        if not self._failed:
            self._recovers(BLAMED_S)
            self._raise(problem)

    def _recovers(self, after_s: float) -> None:
        self.ends()
        self._failed = False
        loop = asyncio.get_running_loop()
        self._recovery = loop.call_later(after_s, self._report, self._finding(State.CLEARED, ""))

    def _raise(self, problem: str) -> None:
        self._report(self._finding(State.RAISED, problem))

    def _finding(self, state: State, problem: str) -> Signal:
        return Signal(FAILED, f"detector:{self._name}", Severity.WARNING, state, problem)


class Context:
    """Implements :class:`tmd.plugin.DetectorContext`; records when the detector was last alive."""

    def __init__(self, host: str, loaded: LoadedDetector, roster: Roster) -> None:
        self._host = host
        self._loaded = loaded
        self._roster = roster
        self.alive_at = self.now()
        self.has_looked = False
        """Whether it is through its first look."""
        self._waits = 0
        """Calls of this class that are waiting: that does not count against the detector."""

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

    @property
    def waiting(self) -> bool:
        return self._waits > 0

    def beat(self) -> None:
        self.alive_at = self.now()

    @contextmanager
    def _wait(self) -> Iterator[None]:
        self._waits += 1
        try:
            yield
        finally:  # the detector may cancel its wait, for example by a timeout of its own
            self._waits -= 1
            self.beat()

    def looked(self) -> None:
        self.has_looked = True

    async def sleep(self, seconds: float) -> None:
        with self._wait():
            await asyncio.sleep(seconds)

    async def worker_events(self) -> AsyncIterator[WorkerEvent]:
        feed = self._roster.subscribe(self.now())
        try:
            while True:
                with self._wait():
                    event = await feed.take()
                yield event
        finally:
            self._roster.unsubscribe(feed)


async def supported(loaded: LoadedDetector, answered: Callable[[float], None]) -> None:
    """Return once the detector can run on this host: a driver or log may appear later. ``answered``
    gets the duration in seconds of each answer."""
    logged = ""
    while True:
        began = time.monotonic()
        reason = loaded.why_not()
        took = time.monotonic() - began
        answered(took)
        if reason is None:
            return
        if reason != logged:
            log.info("detector not used", detector=loaded.origin.name, reason=reason)
        logged = reason
        await asyncio.sleep(min(max(ASK_S, took / ASK_SHARE), LONGEST_ASK_S))


Watching = Coroutine[Any, Any, None]


async def timed(begin: Callable[[], Watching], blocked: Callable[[float], None]) -> None:
    """Begin a coroutine and await it. ``blocked`` gets the duration in seconds of each step that
    holds the event loop for longer than ``BLOCKS_S``."""
    await _steps(begin(), blocked)


@types.coroutine
def _steps(work: Watching, blocked: Callable[[float], None]) -> Generator[Any, Any, None]:
    step = partial(work.send, None)
    while True:
        try:
            with timed_code(blocked), contained_exit(asyncio.CancelledError):
                waits_for = step()
        except StopIteration:
            return
        try:
            yield waits_for
            step = partial(work.send, None)
        except GeneratorExit:
            work.close()
            raise
        except BaseException as error:  # a cancellation, which the work may catch
            step = partial(work.throw, error)


class DetectorRun:
    """One run of a detector, in a task of its own: a plug-in may ignore a cancellation, and nothing
    may wait for it then.

    Args:
        begin: begins the detector.
        context: records when it was last alive.
        deadline_s: how long it may be silent; ``None`` is for ever.
        stuck: called if it has missed its deadline and does not stop.
        blocked: see :func:`timed`.
    """

    def __init__(
        self,
        begin: Callable[[], Watching],
        context: Context,
        deadline_s: float | None,
        stuck: Callable[[], None],
        blocked: Callable[[float], None],
    ) -> None:
        self._running = asyncio.create_task(timed(begin, blocked))
        self._context = context
        self._deadline_s = deadline_s
        self._stuck = stuck
        self._missed = False
        self._told = False

    async def ended(self) -> None:
        """Wait until it has ended. May be cancelled, and called again.

        Raises:
            TimeoutError: it has missed its deadline, and was cancelled for that.
            Exception: what it raised.
        """
        if self._deadline_s is not None and not self._missed:
            await self._wait_until_overdue(self._deadline_s)
        if self._missed and not self._told and not await self.stop():
            self._told = True
            self._stuck()
        await asyncio.wait([self._running])
        if self._missed and self._running.cancelled():
            raise TimeoutError
        self._running.result()

    async def stop(self) -> bool:
        """Cancel it; return whether it has ended within ``STOP_S``."""
        self._running.cancel()
        await asyncio.wait([self._running], timeout=STOP_S)
        return self._running.done()

    async def _wait_until_overdue(self, deadline_s: float) -> None:
        keeper = asyncio.create_task(_overdue(self._context, deadline_s))
        try:
            await asyncio.wait([self._running, keeper], return_when=asyncio.FIRST_COMPLETED)
        finally:
            keeper.cancel()
        self._missed = not self._running.done()


async def _overdue(context: Context, deadline_s: float) -> None:
    """Return once the detector has not been alive for ``deadline_s``."""
    while context.waiting or context.now() - context.alive_at <= deadline_s:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(deadline_s / 4)
