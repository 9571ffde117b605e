"""Links that belong to no group: authenticated streams for the transfer of state."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from math import inf

from tmd.core.values.errors import LinkError, LinkTimeout
from tmd.fabric.link import Link

PARKED = 64
"""Most links that wait for one purpose: those of unexpected callers must not crowd out others."""
PARKED_IN_ALL = 256
"""Most links that wait in all: unexpected callers may name many purposes."""
SLICE = 0.05
"""How often ``cancel`` is polled while waiting."""


class RawLinks:
    """Incoming raw links by purpose, until they are accepted. ``close`` drops the rest."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._parked: deque[tuple[str, Link]] = deque()
        self._closed = False

    def park(self, purpose: str, link: Link) -> None:
        """Keep ``link`` until it is accepted. Those whose callers have hung up are dropped, and the
        oldest beyond a limit."""
        with self._arrived:
            if self._closed:
                return link.close()
            self._sweep()
            alike = [entry for entry in self._parked if entry[0] == purpose]
            if len(alike) >= PARKED:
                self._drop(alike[0])
            elif len(self._parked) >= PARKED_IN_ALL:
                self._drop(self._parked[0])
            self._parked.append((purpose, link))
            self._arrived.notify_all()

    def _sweep(self) -> None:
        """Drop the links whose callers have hung up."""
        for entry in [entry for entry in self._parked if entry[1].ended]:
            self._drop(entry)

    def _drop(self, entry: tuple[str, Link]) -> None:
        self._parked.remove(entry)
        entry[1].close()

    def accept(
        self, purpose: str, *, timeout: float = inf, cancel: Callable[[], bool] | None = None
    ) -> Link:
        """The next link for ``purpose``; raises LinkTimeout after ``timeout``, LinkError on
        ``cancel``.

        Without ``cancel`` the thread sleeps until there is a link: a permanent acceptor must not
        slow down training.
        """
        deadline = time.monotonic() + timeout
        with self._arrived:
            while True:
                self._sweep()
                for entry in self._parked:
                    if entry[0] == purpose:
                        self._parked.remove(entry)
                        return entry[1]
                left = deadline - time.monotonic()
                if self._closed or (cancel is not None and cancel()):
                    raise LinkError(f"waiting for a caller was cancelled ({purpose})")
                if left <= 0:
                    raise LinkTimeout(f"no caller for {purpose} within {timeout} s")
                self._arrived.wait(_pause(left, cancel is not None))

    def close(self) -> None:
        with self._arrived:
            self._closed = True
            for _, link in self._parked:
                link.close()
            self._parked.clear()
            self._arrived.notify_all()


def _pause(left: float, watchful: bool) -> float | None:
    if watchful:
        return min(left, SLICE)
    return None if left == inf else left
