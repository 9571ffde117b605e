"""The workers of this host as the daemon knows them: statuses, exits, how long each is silent.

Pure bookkeeping without IO; times are passed in. Whoever wants to react rings or hears a bell.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from msgspec import structs

from tmd.core.values.model import Exit, WorkerStatus
from tmd.daemon.bus import WakeEvent
from tmd.plugin import WorkerEvent

EXITS_KEPT = 64

QUIET_FIELDS = frozenset(
    ["step", "loss", "step_seconds", "stands_s", "pace", "waiting", "rss_bytes", "shadow", "kept"]
)
"""Progress: told with the next heartbeat. A change of anything else cannot wait."""


@dataclass
class KnownWorker:
    """One live worker."""

    status: WorkerStatus
    heard_at: float
    connected: bool = True


class Roster:
    """Workers and exits of one host. ``urgent`` is rung when the cluster must hear at once."""

    def __init__(self) -> None:
        self.urgent = WakeEvent()
        self.workers: dict[str, KnownWorker] = {}
        self.exits: deque[Exit] = deque()
        self._feeds: set[StatusFeed] = set()

    @property
    def statuses(self) -> tuple[WorkerStatus, ...]:
        return tuple(known.status for known in self.workers.values())

    def ended(self, worker: str) -> bool:
        """Whether it has come to its end for good."""
        known = self._exit_of(worker)
        return known is not None and known.code is not None

    def is_ending(self, worker: str) -> bool:
        """Whether it is not yet known how it ends."""
        known = self._exit_of(worker)
        return known is not None and known.code is None

    def _exit_of(self, worker: str) -> Exit | None:
        return next((e for e in self.exits if e.worker == worker), None)

    def heard(self, status: WorkerStatus, now: float) -> None:
        """A trainer said hello or reported."""
        if self._exit_of(status.worker) is not None:
            return
        known = self.workers.get(status.worker)
        if known is None:
            known = self.workers[status.worker] = KnownWorker(status, now)
            urgent = True
        else:
            urgent = is_urgent(known.status, status)
            known.status, known.heard_at, known.connected = status, now, True
        if urgent:
            self.urgent.ring()
            self._tell(self._event(known, now))

    def lost(self, worker: str, now: float) -> None:
        """A trainer's connection closed. Whether it ended is the launcher's word."""
        known = self.workers.get(worker)
        if known is not None:
            known.connected = False
            self._tell(self._event(known, now))

    def exited(self, exit_: Exit) -> None:
        """A worker ended, or begins to; only how it ended is news then."""
        before = self._exit_of(exit_.worker)
        if before is not None and (before.code is not None or exit_.code is None):
            return
        known = self.workers.pop(exit_.worker, None)
        if before is None:
            self.exits.append(exit_)
        else:
            exit_ = structs.replace(exit_, at=before.at)
            self.exits[self.exits.index(before)] = exit_
        self.urgent.ring()
        status = known.status if known else None
        self._tell(WorkerEvent(worker=exit_.worker, job=exit_.job, status=status, exit=exit_))
        while len(self.exits) > EXITS_KEPT:
            old = self.exits.popleft()
            self._tell(WorkerEvent(worker=old.worker, job=old.job, exit=old, forgotten=True))

    def excuse(self, seconds: float) -> None:
        """This process itself stood still so long: nobody is to blame for the silence."""
        for known in self.workers.values():
            known.heard_at += seconds

    # --- for detectors ----------------------------------------------------------------------------

    def subscribe(self, now: float) -> StatusFeed:
        """A feed that begins with all that is known. Closed by :meth:`unsubscribe`."""
        feed = StatusFeed()
        self._feeds.add(feed)
        for exit_ in self.exits:
            feed.put(WorkerEvent(worker=exit_.worker, job=exit_.job, exit=exit_))
        for known in self.workers.values():
            feed.put(self._event(known, now))
        return feed

    def unsubscribe(self, feed: StatusFeed) -> None:
        self._feeds.discard(feed)

    def repeat(self, now: float) -> None:
        """Tell all live workers again, with the present length of their silence."""
        for known in self.workers.values():
            self._tell(self._event(known, now))

    def _event(self, known: KnownWorker, now: float) -> WorkerEvent:
        return WorkerEvent(
            worker=known.status.worker,
            job=known.status.job,
            status=known.status,
            connected=known.connected,
            silent_s=max(0.0, now - known.heard_at),
        )

    def _tell(self, event: WorkerEvent) -> None:
        for feed in self._feeds:
            feed.put(event)


class StatusFeed:
    """The latest event of each worker that has not been taken yet: bounded, never a backlog."""

    def __init__(self) -> None:
        self._pending: dict[str, WorkerEvent] = {}
        self._filled = asyncio.Event()

    def put(self, event: WorkerEvent) -> None:
        self._pending[event.worker] = event
        self._filled.set()

    async def take(self) -> WorkerEvent:
        await self._filled.wait()
        worker = next(iter(self._pending))
        event = self._pending.pop(worker)
        if not self._pending:
            self._filled.clear()
        return event


def is_urgent(before: WorkerStatus, after: WorkerStatus) -> bool:
    """Whether anything but progress changed."""
    if before == after:
        return False
    return any(
        before_value != after_value
        for (name, before_value), after_value in zip(
            structs.asdict(before).items(), structs.astuple(after), strict=True
        )
        if name not in QUIET_FIELDS
    )
