"""The listening socket of a worker: unauthenticated callers are refused here.

One thread advances all handshakes at once, so a slow one delays no other. Their number, size and
duration are bounded; beyond the limit the oldest is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable

from tmd.core.values.errors import LinkRefused
from tmd.core.values.reasons import in_words
from tmd.fabric.handshake import LinkHello, Seal, Talk, acceptor

HALF_OPEN = 64
DEADLINE = 5.0

_log = logging.getLogger("tmd.fabric")

Admit = Callable[[LinkHello, socket.socket, Seal], None]
"""Takes over an authenticated connection and answers it; must not block."""


class _Guest:
    """A connection whose handshake is not complete."""

    def __init__(self, sock: socket.socket, host: str, talk: Talk[tuple[LinkHello, Seal]]) -> None:
        self.sock = sock
        self.host = host
        self.talk = talk
        self.since = time.monotonic()
        self._want = next(talk)
        self._have = b""

    def hear(self) -> tuple[LinkHello, Seal] | None:
        """Read what is there and go on with the talk; the outcome once it is complete."""
        try:
            while True:
                if isinstance(self._want, bytes):
                    self.sock.send(self._want)
                    self._want = next(self.talk)
                elif len(self._have) == self._want:
                    data, self._have = self._have, b""
                    self._want = self.talk.send(data)
                else:
                    more = self.sock.recv(self._want - len(self._have))
                    if not more:
                        raise LinkRefused("closed the connection during the handshake")
                    self._have += more
        except BlockingIOError:
            return None
        except StopIteration as done:
            outcome: tuple[LinkHello, Seal] = done.value
            return outcome


class Listener:
    """Accepts links for ``worker`` until closed. ``close`` ends its thread."""

    def __init__(self, host: str, key: bytes, worker: str, admit: Admit) -> None:
        self._key = key
        self._worker = worker
        self._admit = admit
        self._sock = socket.create_server((host, 0), backlog=256)
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._select = selectors.DefaultSelector()
        self._select.register(self._sock, selectors.EVENT_READ)
        self._select.register(self._woken, selectors.EVENT_READ)
        self._guests: dict[int, _Guest] = {}
        self._told: set[tuple[str, str]] = set()
        self._thread = threading.Thread(target=self._run, name="tmd-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and drop half-open connections."""
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(5)
        self._wake.close()

    def _run(self) -> None:
        while True:
            patience = DEADLINE / 2 if self._guests else None
            for event, _ in self._select.select(patience):
                if event.fileobj is self._woken:
                    return self._end()
                if event.fileobj is self._sock:
                    self._welcome()
                elif guest := self._guests.get(event.fd):
                    self._listen_to(guest)
            self._expire()

    def _welcome(self) -> None:
        try:
            sock, address = self._sock.accept()
        except OSError:
            return
        if len(self._guests) >= HALF_OPEN:
            self._drop(next(iter(self._guests.values())), "too many half-open connections")
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        guest = _Guest(sock, address[0], acceptor(self._key, self._worker))
        self._guests[sock.fileno()] = guest
        self._select.register(sock, selectors.EVENT_READ)

    def _listen_to(self, guest: _Guest) -> None:
        try:
            outcome = guest.hear()
        except (LinkRefused, OSError) as e:
            return self._drop(guest, in_words(e))
        if outcome is None:
            return
        self._forget(guest)
        try:
            self._admit(outcome[0], guest.sock, outcome[1])
        except OSError as e:  # closed while being answered
            guest.sock.close()
            _log.warning("link of %s lost during the handshake: %s", outcome[0].worker, e)

    def _expire(self) -> None:
        now = time.monotonic()
        for guest in [g for g in self._guests.values() if now - g.since > DEADLINE]:
            self._drop(guest, "did not complete the handshake in time")

    def _forget(self, guest: _Guest) -> None:
        self._select.unregister(guest.sock)
        del self._guests[guest.sock.fileno()]

    def _drop(self, guest: _Guest, reason: str) -> None:
        self._forget(guest)
        guest.sock.close()
        told = (guest.host, reason)
        # A port scan must not fill the log: each reason is logged once per host and period.
        if told not in self._told and len(self._told) < 1024:
            self._told.add(told)
            _log.warning("connection from %s refused: %s", guest.host, reason)

    def _end(self) -> None:
        for guest in list(self._guests.values()):
            self._forget(guest)
            guest.sock.close()
        self._select.close()
        self._sock.close()
        self._woken.close()
