"""Ends a link with data in flight once the kernel of the peer no longer answers.

A host that vanished resets no connection. Keepalive finds that out only on an idle link, and TCP
itself gives up on unacknowledged data after a quarter of an hour. ``TCP_USER_TIMEOUT`` is no
remedy: it also ends a link to a live peer that has not read for that long. Every live kernel
answers retransmissions and the probes of a full receive window, so only unanswered ones count here.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from struct import Struct
from typing import NamedTuple, Protocol
from weakref import WeakSet

from tmd.core.values.errors import LinkError

LOOK_S = 3.0
"""Interval at which all links are looked at."""
SILENT_MS = 15_000
"""Time without any acknowledgement after which a peer may count as silent."""
RETRANSMITS = 5
"""Retransmissions in a row without an answer that make it silent, at the least."""
PROBES = 3
"""Probes in a row without an answer that make it silent, at the least."""

_INFO = Struct("=2xBB20xI24xII")

log = logging.getLogger("tmd.fabric")


class TcpInfo(NamedTuple):
    """Some fields of the kernel's ``struct tcp_info``."""

    retransmits: int
    """Retransmissions since the latest acknowledgement of new data."""
    probes: int
    """Probes of an idle link or of a full receive window since the latest answer."""
    unacked: int
    """Segments that are sent and not acknowledged."""
    last_data_ms: int
    """Time since data arrived."""
    last_ack_ms: int
    """Time since an acknowledgement arrived, of whatever."""


def tcp_info(sock: socket.socket) -> bytes:
    """The kernel's ``struct tcp_info`` of a connection, as far as it is used here."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)


def parsed(info: bytes) -> TcpInfo:
    """The fields of a ``struct tcp_info``."""
    return TcpInfo(*_INFO.unpack_from(info))


def is_silent(info: bytes) -> bool:
    """Whether a ``struct tcp_info`` shows that the peer's kernel does not answer any more.

    An idle link never counts as silent: keepalive covers it.
    """
    found = parsed(info)
    resent = found.unacked > 0 and found.retransmits >= RETRANSMITS
    return found.last_ack_ms >= SILENT_MS and (resent or found.probes >= PROBES)


class Listened(Protocol):
    """A link, as it is looked at here."""

    peer: str

    def in_use(self) -> AbstractContextManager[socket.socket]: ...


class SilenceWatch:
    """Owns a thread from the first link on. Links are forgotten once nobody else has them."""

    def __init__(self, judge: Callable[[bytes], bool] = is_silent) -> None:
        self._judge = judge
        self._links: WeakSet[Listened] = WeakSet()
        self._changing = threading.Lock()
        self._never = threading.Event()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """Number of links that are watched."""
        return len(self._snapshot())

    def add(self, link: Listened) -> None:
        """Watch ``link`` until it has ended."""
        with self._changing:
            self._links.add(link)
            # A forked process has the thread's object without the thread.
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name="tmd-silence", daemon=True)
                with suppress(RuntimeError):  # no thread can be had: the next link tries again
                    thread.start()
                    self._thread = thread

    def look(self) -> None:
        """Look at each link once; end those whose peer is silent and forget those that ended."""
        for link in self._snapshot():
            if self._is_over(link):
                with self._changing:
                    self._links.discard(link)

    def _is_over(self, link: Listened) -> bool:
        try:
            with link.in_use() as sock:
                if not self._judge(tcp_info(sock)):
                    return False
                log.warning("ending a link to %s: its host does not answer any more", link.peer)
                # Not severed: for its holder it must look like a loss of the peer.
                sock.shutdown(socket.SHUT_RDWR)
        except LinkError:
            pass
        return True

    def _snapshot(self) -> list[Listened]:
        with self._changing:
            return list(self._links)

    def _run(self) -> None:
        while not self._never.wait(LOOK_S):
            self.look()


WATCH = SilenceWatch()
"""The watch of this process."""
