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
"""Most links of one caller that wait for one purpose: unexpected ones must not crowd out others."""
PARKED_IN_ALL = 4096
"""Most links that wait in all: unexpected callers may name many purposes. The first rank of a group
is called by all others at once."""
SWEPT = 64
"""While at most this many links wait, each arrival checks all of them for callers that have hung
up. Beyond it, only one arrival in this many does."""
SLICE = 0.05
"""How often ``cancel`` is polled while waiting."""


class RawLinks:
    """Incoming raw links by purpose, until they are accepted. ``close`` drops the rest."""

    def __init__(self, most: int = PARKED_IN_ALL) -> None:
        """``most``: see :data:`PARKED_IN_ALL`."""
        self._most = most
        self._arrived = threading.Condition()
        self._parked: dict[str, deque[Link]] = {}
        """By purpose, the oldest first."""
        self._declined: deque[str] = deque(maxlen=PARKED)
        """Purposes that are fulfilled."""
        self._unswept = 0
        self._closed = False

    def decline(self, purpose: str) -> None:
        """Drop all links for ``purpose``, also later ones until :meth:`decline_none`: their callers
        shall not wait."""
        with self._arrived:
            self._declined.append(purpose)
            for link in list(self._parked.get(purpose, ())):
                self._drop(purpose, link)

    def decline_none(self) -> None:
        """Keep links for every purpose again."""
        with self._arrived:
            self._declined.clear()

    def park(self, purpose: str, link: Link) -> None:
        """Keep ``link`` until it is accepted. Those whose callers have hung up are dropped, and the
        oldest beyond a limit."""
        with self._arrived:
            if self._closed or purpose in self._declined:
                return link.close()
            self._unswept += 1
            if self._count() <= SWEPT or self._unswept >= SWEPT:
                self._sweep()
            alike = [each for each in self._parked.get(purpose, ()) if each.peer == link.peer]
            if len(alike) >= PARKED:
                self._drop(purpose, alike[0])
            elif self._count() >= self._most:
                oldest = next(iter(self._parked))
                self._drop(oldest, self._parked[oldest][0])
            self._parked.setdefault(purpose, deque()).append(link)
            self._arrived.notify_all()

    def _count(self) -> int:
        return sum(map(len, self._parked.values()))

    def _sweep(self) -> None:
        """Drop the links whose callers have hung up."""
        self._unswept = 0
        parked = [(purpose, link) for purpose, links in self._parked.items() for link in links]
        for purpose, link in parked:
            if link.ended:
                self._drop(purpose, link)

    def _drop(self, purpose: str, link: Link) -> None:
        self._parked[purpose].remove(link)
        if not self._parked[purpose]:
            del self._parked[purpose]
        link.close()

    def _next(self, purpose: str) -> Link | None:
        """The oldest link for ``purpose`` whose caller waits."""
        while links := self._parked.get(purpose):
            link = links.popleft()
            if not links:
                del self._parked[purpose]
            if not link.ended:
                return link
            link.close()
        return None

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
                if (link := self._next(purpose)) is not None:
                    return link
                left = deadline - time.monotonic()
                if self._closed or (cancel is not None and cancel()):
                    raise LinkError(f"waiting for a caller was cancelled ({purpose})")
                if left <= 0:
                    raise LinkTimeout(f"no caller for {purpose} within {timeout} s")
                self._arrived.wait(_pause(left, cancel is not None))

    def close(self) -> None:
        with self._arrived:
            self._closed = True
            for links in self._parked.values():
                for link in links:
                    link.close()
            self._parked.clear()
            self._arrived.notify_all()


def _pause(left: float, watchful: bool) -> float | None:
    if watchful:
        return min(left, SLICE)
    return None if left == inf else left
