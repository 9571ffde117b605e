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
from tmd.daemon.foreign_code import contained_exit
from tmd.daemon.plugins import LoadedDetector
from tmd.daemon.roster import Roster
from tmd.plugin import DetectorConfig, WorkerEvent

log = structlog.get_logger("tmd.watcher")

ASK_S = 10.0
"""Interval at which a detector that cannot run on this host is checked again."""
STOP_S = 5.0
"""Longest wait for a detector that is to end."""
BLOCKS_S = 1.0
"""A detector that keeps the event loop for this long keeps the daemon from its work."""


class StopRequest(Enum):
    """What has come of the request that a detector stops."""

    NONE = "none"
    AWAITED = "awaited"
    """A reload waits for its end."""
    OVERDUE = "overdue"
    """It has not stopped in time."""


class WatchedDetector:
    """A detector and its task, if it runs."""

    def __init__(self, loaded: LoadedDetector) -> None:
        self.loaded = loaded
        self.strategy, self.rules = loaded.strategy, loaded.rules
        """May change while the detector runs."""
        self.task: asyncio.Task[None] | None = None
        self.request = StopRequest.NONE
        self.successor: LoadedDetector | None = None
        """What is started once an overdue one ends; ``None``: it was removed."""
        self.allowance = Allowance(BURST, PER_SECOND)


class Context:
    """Implements :class:`tmd.plugin.DetectorContext`; records when the detector was last alive."""

    def __init__(self, host: str, loaded: LoadedDetector, roster: Roster) -> None:
        self._host = host
        self._loaded = loaded
        self._roster = roster
        self.alive_at = self.now()
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


async def supported(loaded: LoadedDetector) -> None:
    """Return once the detector can run on this host: a driver or log may appear later."""
    logged = ""
    while (reason := loaded.why_not()) is not None:
        if reason != logged:
            log.info("detector not used", detector=loaded.origin.name, reason=reason)
        logged = reason
        await asyncio.sleep(ASK_S)


Watching = Coroutine[Any, Any, None]


async def timed(begin: Callable[[], Watching], blocked: Callable[[float], None]) -> None:
    """Begin a coroutine and await it. ``blocked`` gets the duration in seconds of each step that
    holds the event loop for longer than ``BLOCKS_S``."""
    await _steps(begin(), blocked)


@types.coroutine
def _steps(work: Watching, blocked: Callable[[float], None]) -> Generator[Any, Any, None]:
    step = partial(work.send, None)
    while True:
        began = time.monotonic()
        try:
            with contained_exit(asyncio.CancelledError):
                waits_for = step()
        except StopIteration:
            return
        finally:
            if (took := time.monotonic() - began) > BLOCKS_S:
                blocked(took)
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
