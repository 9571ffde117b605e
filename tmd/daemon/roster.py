"""The workers of this host as the daemon knows them: statuses, exits, how long each is silent.

Pure bookkeeping without IO; times are passed in.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec import structs

from tmd.core.values.encodable import with_encodable_loss
from tmd.core.values.model import Exit, WorkerStatus
from tmd.daemon.bus import WakeEvent
from tmd.plugin import WorkerEvent

EXITS_KEPT = 64
"""At least this many exits are kept, and twice as many as there were workers at once: a job has
ended only once the exits of all its workers are known."""

QUIET_FIELDS = frozenset(
    ["step", "loss", "step_seconds", "stands_s", "pace", "waiting", "rss_bytes", "shadow", "kept"]
)
"""Progress is published with the next heartbeat. Any other change is urgent."""


@dataclass
class KnownWorker:
    """One live worker."""

    status: WorkerStatus
    heard_at: float
    connected: bool = True


class Roster:
    """Workers and exits of one host. ``urgent`` rings when the cluster must know at once."""

    def __init__(self) -> None:
        self.urgent = WakeEvent()
        self.records_due = WakeEvent()
        """Rings when the records of the jobs here are to be read: a worker is new, or a record
        may have changed."""
        self.workers: dict[str, KnownWorker] = {}
        self.exits: deque[Exit] = deque()
        self.returned: set[str] = set()
        """Exited workers under whose name another process has connected, until their launcher
        reports their exit."""
        self._restored: frozenset[str] = frozenset()
        """Workers whose exits an earlier run of the daemon has reported to its detectors."""
        self._most = 0
        """Most workers at once."""
        self._launching: Counter[str] = Counter()
        """Connected launchers by job."""
        self._feeds: set[StatusFeed] = set()

    @property
    def statuses(self) -> tuple[WorkerStatus, ...]:
        """Of all live workers, as JSON can hold them."""
        return tuple(with_encodable_loss(known.status) for known in self.workers.values())

    @property
    def jobs(self) -> set[str]:
        """Jobs with live workers or a launcher here. After a restart of the daemon, a worker that
        hangs is known by its launcher alone, which may have to kill it."""
        return {known.status.job for known in self.workers.values()} | {*self._launching}

    @contextmanager
    def launching(self, job: str) -> Iterator[None]:
        """While a launcher of ``job`` is connected."""
        self._launching[job] += 1
        self.records_due.ring()
        try:
            yield
        finally:
            self._launching = +(self._launching - Counter([job]))

    def ended(self, worker: str) -> bool:
        """Whether the worker has exited."""
        known = self._exit_of(worker)
        return known is not None and known.code is not None

    def is_ending(self, worker: str) -> bool:
        """Whether the worker has begun to exit and its status is unknown."""
        known = self._exit_of(worker)
        return known is not None and known.code is None

    def _exit_of(self, worker: str) -> Exit | None:
        return next((e for e in self.exits if e.worker == worker), None)

    def restore(self, exits: Iterable[Exit]) -> None:
        """Take in the exits that an earlier run of the daemon knew."""
        self.exits.extend(exits)
        self._most = max(self._most, len(self.exits) // 2)
        self._restored = frozenset(each.worker for each in self.exits)

    def report(self, status: WorkerStatus, now: float) -> None:
        """Take in a status from a trainer's hello or report."""
        if self._exit_of(status.worker) is not None:
            return
        known = self.workers.get(status.worker)
        if known is None:
            known = self.workers[status.worker] = KnownWorker(status, now)
            urgent = True
            self._most = max(self._most, len(self.workers))
            self.records_due.ring()
        else:
            urgent = is_urgent(known.status, status)
            known.status, known.heard_at, known.connected = status, now, True
        if urgent:
            self.urgent.ring()
            self._send(self._event(known, now))

    def lost(self, worker: str, now: float) -> None:
        """Note that a trainer's connection closed. Only the launcher reports whether it exited."""
        known = self.workers.get(worker)
        if known is not None:
            known.connected = False
            self._send(self._event(known, now))

    def exited(self, exit_: Exit) -> None:
        """Note that a worker exited or begins to; after that only its exit code is news."""
        self.returned.discard(exit_.worker)
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
        self._send(WorkerEvent(worker=exit_.worker, job=exit_.job, status=status, exit=exit_))
        while len(self.exits) > max(EXITS_KEPT, 2 * self._most):
            old = self.exits.popleft()
            self.returned.discard(old.worker)
            self._send(WorkerEvent(worker=old.worker, job=old.job, exit=old, forgotten=True))

    def excuse(self, seconds: float) -> None:
        """Extend all deadlines by the time that this process itself was not running."""
        for known in self.workers.values():
            known.heard_at += seconds

    # --- for detectors ----------------------------------------------------------------------------

    def subscribe(self, now: float) -> StatusFeed:
        """A feed that starts with everything that this run of the daemon knows. Closed by
        :meth:`unsubscribe`."""
        feed = StatusFeed()
        self._feeds.add(feed)
        for exit_ in [each for each in self.exits if each.worker not in self._restored]:
            feed.put(WorkerEvent(worker=exit_.worker, job=exit_.job, exit=exit_))
        for known in self.workers.values():
            feed.put(self._event(known, now))
        return feed

    def unsubscribe(self, feed: StatusFeed) -> None:
        self._feeds.discard(feed)

    def repeat(self, now: float) -> None:
        """Send the status of every live worker again, with its current time of silence."""
        for known in self.workers.values():
            self._send(self._event(known, now))

    def _event(self, known: KnownWorker, now: float) -> WorkerEvent:
        return WorkerEvent(
            worker=known.status.worker,
            job=known.status.job,
            status=known.status,
            connected=known.connected,
            silent_s=max(0.0, now - known.heard_at),
        )

    def _send(self, event: WorkerEvent) -> None:
        for feed in self._feeds:
            feed.put(event)


class StatusFeed:
    """The latest event of each worker that has not been taken: bounded, never a backlog."""

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
