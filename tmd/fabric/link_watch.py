"""Notices the end of a peer although no operation reads its links.

The collectives of an inner group do not use the links of tmd, and a lost peer makes them wait for
ever. So one thread watches the links of the votes. A worker that leaves in good order says so on
them first, or others that are still behind would take it for lost.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Protocol

from tmd.core.values.errors import LinkError
from tmd.core.values.model import Member
from tmd.fabric.frame import BYE, HEADER_SIZE, VOTE
from tmd.fabric.link import Link
from tmd.fabric.transfer import PeerLost

AGAIN_S = 0.05
"""How often a link is looked at whose peer has closed it, and which still has unread data."""
IDLE_S = 1.0
"""How often the thread looks whether it is still needed."""

_log = logging.getLogger("tmd.fabric")


class WatchedEpoch(Protocol):
    """The epoch whose links are watched."""

    def has(self, link: Link) -> bool: ...
    def blame(self, error: LinkError) -> None: ...


class _End(Enum):
    NOTHING = auto()  # closed here, or not closed at all
    ORDERLY = auto()
    UNREAD = auto()  # the peer has closed it, but data that it sent before is unread
    LOST = auto()


class LinkWatch:
    """Owns a thread from the first link on. It does nothing unless ``enabled``."""

    def __init__(self, current: Callable[[], WatchedEpoch | None]) -> None:
        self.enabled = False
        self._current = current
        self._links: dict[int, Link] = {}
        self._unread: dict[int, Link] = {}
        self._epoll: select.epoll | None = None
        self._closed = threading.Event()
        self._changing = threading.Lock()

    def opened(self, group: str, link: Link) -> None:
        """Watch ``link`` of ``group`` until it is closed; idempotent."""
        if not self.enabled or group != VOTE:
            return
        with self._changing, contextlib.suppress(OSError, ValueError):
            self._epoll = self._epoll or self._started()
            if self._epoll is None:
                return
            # Not those that were closed here: their descriptors may be others by now.
            self._links = {fd: each for fd, each in self._links.items() if not each.severed}
            fd = link.sock.fileno()
            if self._links.get(fd) is link:
                return
            # The kernel forgets a descriptor when it is closed; its number may come again.
            self._links[fd] = link
            self._epoll.register(fd, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def missed(self, gone: Sequence[Member]) -> None:
        """``gone`` have died between the vote and this epoch. Their links are not watched."""
        current = self._current()
        if gone and current is not None:
            current.blame(PeerLost(gone[0].worker, "its process has ended"))

    def leaves(self, group: str, link: Link) -> None:
        """Tell the peer, if there is room, that this side closes ``link`` in good order."""
        if self.enabled and group == VOTE:
            with contextlib.suppress(OSError):
                link.sock.send(BYE, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def close(self) -> None:
        self._closed.set()

    def _started(self) -> select.epoll | None:
        """Start the thread; ``None`` if no thread can be had, and the next link tries again."""
        epoll = select.epoll()
        try:
            run = threading.Thread(
                target=self._run, args=(epoll,), name="tmd-link-watch", daemon=True
            )
            run.start()
        except RuntimeError as error:
            epoll.close()
            _log.warning("the end of a peer may be noticed late: %s", error)
            return None
        return epoll

    def _run(self, epoll: select.epoll) -> None:
        while not self._closed.is_set():
            events = epoll.poll(AGAIN_S if self._unread else IDLE_S)
            ended = {fd: self._links.get(fd) for fd, _ in events}
            for fd, link in {**self._unread, **ended}.items():
                if link is not None:
                    self._judge(fd, link)
        with self._changing:
            epoll.close()

    def _judge(self, fd: int, link: Link) -> None:
        self._unread.pop(fd, None)
        end = _end_of(link)
        if end is _End.UNREAD:
            self._unread[fd] = link
        if end is not _End.LOST:
            return
        current = self._current()
        if current is not None and current.has(link):
            current.blame(PeerLost(link.peer, "its process has ended"))
        else:
            # Perhaps of an epoch that is about to begin; a link of one that is over gets closed.
            self._unread[fd] = link


def _end_of(link: Link) -> _End:
    if link.severed:
        return _End.NOTHING
    try:
        rest = link.sock.recv(HEADER_SIZE, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return _End.NOTHING
    except OSError:
        return _End.NOTHING if link.severed else _End.LOST
    if not rest:
        return _End.LOST
    return _End.ORDERLY if rest == BYE[: len(rest)] else _End.UNREAD
