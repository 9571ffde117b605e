"""Alerts on this host's disk, so that neither a store outage nor a restart loses one.

An alert is written here before it is published. A separate thread uses the disk and may hang
without harm. While the disk is full, read-only or does not answer, memory replaces it; the log
reports that once.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from tmd.core.values.model import Alert
from tmd.core.values.reasons import in_words
from tmd.daemon.ledger import Bounds, Ledger

log = structlog.get_logger("tmd.journal")

T = TypeVar("T")


class Journal:
    """One per daemon. Closed by :meth:`close`.

    Args:
        path: the file; ``None`` keeps everything in memory.
        patience_s: how long to wait for an answer of the disk.
        retry_s: least time between two tries of a failed disk; only :meth:`add` tries.
    """

    def __init__(
        self,
        path: Path | None,
        bounds: Bounds | None = None,
        *,
        patience_s: float = 5.0,
        retry_s: float = 60.0,
    ) -> None:
        self._path = path
        self._bounds = bounds or Bounds()
        self._patience_s = patience_s
        self._retry_s = retry_s
        self._disk: _Disk | None = None
        self._memory: Ledger | None = None
        """The ledger that is used while the disk cannot be."""
        self._numbered: Ledger | None = None
        """The ledger whose numbers the last :meth:`waiting` has returned."""
        self._carrying = asyncio.Lock()
        """Held while alerts are carried from a broken disk to memory, or back."""
        self._retry_at = 0.0
        self._abandoned: list[_Disk] = []
        """Disks that did not answer; while one is stuck, no other is tried."""

    async def add(self, alerts: Sequence[Alert]) -> None:
        """Append ``alerts`` in this order."""
        async with self._carrying:
            await self._return_to_disk()
        now = time.time()
        await self._ask(lambda ledger: ledger.add(alerts, now))

    async def waiting(self, limit: int) -> list[tuple[int, Alert]]:
        """The oldest unpublished alerts, each with the number that :meth:`published` takes."""
        self._numbered, found = await self._ask(lambda ledger: (ledger, ledger.waiting(limit)))
        return found

    async def published(self, numbers: Sequence[int]) -> None:
        """Mark the alerts of the last :meth:`waiting` that the store has accepted.

        Nothing is marked if disk and memory have changed places since: the numbers differ there.
        The store ignores alerts that it already has.
        """
        numbered = self._numbered

        def mark(ledger: Ledger) -> None:
            if ledger is numbered:
                ledger.published(numbers)

        await self._ask(mark)

    async def last_published(self) -> Alert | None:
        """The newest alert that the store has accepted, if it is still kept."""
        return await self._ask(Ledger.last_published)

    async def injected(self) -> list[Alert]:
        """The alerts of injected findings that are kept, published or not, oldest first."""
        return await self._ask(Ledger.injected)

    async def forget_published(self) -> None:
        """Mark all alerts as unpublished: the store has lost them."""
        await self._ask(Ledger.forget_published)

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()
        if self._memory is not None:
            self._memory.close()

    # --- disk or memory ---------------------------------------------------------------------------

    async def _ask(self, work: Callable[[Ledger], T]) -> T:
        while True:
            if self._path is None or self._memory is not None:
                async with self._carrying:  # until memory has what the disk had
                    if self._path is None and self._memory is None:
                        self._memory = Ledger(":memory:", self._bounds)
                    if self._memory is not None:
                        return work(self._memory)
                continue
            disk = self._disk
            try:
                if disk is None:
                    disk = self._disk = self._new_disk(self._path)
                return await disk.ask(work)
            except (sqlite3.Error, OSError) as error:  # TimeoutError is an OSError
                async with self._carrying:
                    if self._disk is disk and self._memory is None:  # the first to find it broken
                        await self._leave_disk(error)

    def _new_disk(self, path: Path) -> _Disk:
        return _Disk(path, self._bounds, self._patience_s)

    async def _leave_disk(self, error: Exception) -> None:
        self._memory = Ledger(":memory:", self._bounds)
        self._retry_at = time.monotonic() + self._retry_s
        disk, self._disk = self._disk, None
        carried = await self._carry_over(disk, error) if disk is not None else 0
        log.warning(
            "journal not writable, alerts are kept in memory",
            path=str(self._path),
            error=in_words(error),
            carried=carried,
        )

    async def _carry_over(self, disk: _Disk, error: Exception) -> int:
        """Copy unpublished alerts to memory, if they can be read; return how many.

        The store ignores alerts that it already has.
        """
        assert self._memory is not None
        try:
            if isinstance(error, TimeoutError):
                raise error
            rows = await disk.ask(lambda ledger: ledger.waiting(self._bounds.alerts))
        except TimeoutError:
            self._abandon(disk)
            return 0
        except (sqlite3.Error, OSError):
            rows = []
        disk.close()
        self._memory.add([alert for _, alert in rows], time.time())
        return len(rows)

    def _abandon(self, disk: _Disk) -> None:
        disk.close(0)
        self._abandoned.append(disk)

    async def _return_to_disk(self) -> None:
        """While in memory, try the disk again every ``retry_s``."""
        if self._path is None or self._memory is None or time.monotonic() < self._retry_at:
            return
        self._retry_at = time.monotonic() + self._retry_s
        self._abandoned = [disk for disk in self._abandoned if disk.busy]
        if self._abandoned:
            return
        try:
            disk = self._new_disk(self._path)
        except OSError:
            return
        rows = self._memory.waiting(self._bounds.alerts)
        try:
            await disk.ask(lambda ledger: ledger.add([alert for _, alert in rows], time.time()))
        except TimeoutError:
            self._abandon(disk)
            return
        except (sqlite3.Error, OSError):
            disk.close()
            return
        log.info("journal is written to disk again", path=str(self._path))
        self._memory.close()
        self._disk, self._memory = disk, None


class _Disk:
    """A ledger in a daemon thread: a disk that hangs does not keep the process alive.

    Raises:
        OSError: no thread can be had.
    """

    def __init__(self, path: Path, bounds: Bounds, patience_s: float) -> None:
        self._path = path
        self._bounds = bounds
        self._patience_s = patience_s
        self._ledger: Ledger | None = None
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="tmd-journal", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the limit of threads or of memory is reached
            raise OSError(in_words(error)) from error

    @property
    def busy(self) -> bool:
        return self._thread.is_alive()

    async def ask(self, work: Callable[[Ledger], T]) -> T:
        """The result of ``work``.

        Raises:
            sqlite3.Error: the disk is full, read-only or broken.
            TimeoutError: the disk does not answer.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._orders.put(lambda: self._carry_out(work, loop, answer))
        async with asyncio.timeout(self._patience_s):
            return await answer

    def close(self, patience_s: float = 1.0) -> None:
        """End the thread once it has finished its queue."""
        self._orders.put(None)
        self._thread.join(patience_s)

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            order()
        if self._ledger is not None:
            self._ledger.close()

    def _carry_out(
        self,
        work: Callable[[Ledger], T],
        loop: asyncio.AbstractEventLoop,
        answer: asyncio.Future[T],
    ) -> None:
        try:
            if self._ledger is None:
                self._ledger = _opened(self._path, self._bounds)
            settle = partial(_settle, answer.set_result, work(self._ledger), answer)
        except Exception as error:  # the caller gets it
            settle = partial(_settle, answer.set_exception, error, answer)
        with contextlib.suppress(RuntimeError):  # the loop may have ended
            loop.call_soon_threadsafe(settle)


def _settle(settle: Callable[[Any], None], result: Any, answer: asyncio.Future[Any]) -> None:
    if not answer.done():  # the caller may have given up
        settle(result)


def _opened(path: Path, bounds: Bounds) -> Ledger:
    """The ledger at ``path``; a file that is not a database is moved aside."""
    try:
        return Ledger(str(path), bounds)
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        aside = path.with_name(f"{path.name}.broken")
        log.warning(
            "journal is damaged, starting a new one", aside=str(aside), error=in_words(error)
        )
        path.replace(aside)
        return Ledger(str(path), bounds)
