"""The listening socket of a worker: unauthenticated callers are refused here.

One thread advances all handshakes at once, so a slow one delays no other. Their number, size and
duration are bounded. At the limit the listener drops a silent caller to admit another one. If no
caller is silent, new ones wait in the backlog. A refused caller sees an orderly close, and a
dropped one sees a reset, so that it can tell them apart.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable

from tmd.core.values.errors import LinkRefused
from tmd.core.values.reasons import in_words
from tmd.fabric.handshake import LinkHello, Seal, Talk, acceptor

HALF_OPEN = 64
DEADLINE = 5.0
"""Longest wait for the next answer of a caller, in seconds."""
GREETING_S = 0.1
"""A caller that has not sent its greeting after so long may be dropped for a new one."""
PROOF_S = 1.0
"""The same for one that has been sent a challenge."""
BACKLOG = 1024
"""Callers that wait in the kernel, which may allow fewer: all other ranks of a job may call at
once, as for a gather by messages."""

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with which closing a connection resets it."""
MOST_UNREAD = 16
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of a process or machine that has no resources for one more connection."""
EXHAUSTED_S = 0.1
"""Pause after such an error. The socket stays readable, so that without a pause a loop over it
would take a core from training."""
MOST_LOGGED = 1024
LOGGED_S = 600.0
"""Each reason is logged once per host in this time: a port scan must not fill the log."""

_log = logging.getLogger("tmd.fabric")

Admit = Callable[[LinkHello, socket.socket, Seal], None]
"""Takes over an authenticated connection and answers it; must not block."""


class _HalfOpen:
    """A connection whose handshake is not complete."""

    def __init__(self, sock: socket.socket, host: str, talk: Talk[tuple[LinkHello, Seal]]) -> None:
        self.sock = sock
        self.host = host
        self.talk = talk
        self.since = time.monotonic()
        self.greeted = False
        self._want = next(talk)
        self._have = b""

    @property
    def silent_at(self) -> float:
        """When it may be dropped for another caller."""
        return self.since + (PROOF_S if self.greeted else GREETING_S)

    def advance(self) -> tuple[LinkHello, Seal] | None:
        """Read what is there and go on with the talk; the outcome once it is complete."""
        try:
            while True:
                if isinstance(self._want, bytes):
                    self.sock.send(self._want)
                    self._want = next(self.talk)
                    # Its greeting may have waited here, while this process stood still.
                    self.since, self.greeted = time.monotonic(), True
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
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._select = selectors.DefaultSelector()
        self._accepts = False
        self._select.register(self._woken, selectors.EVENT_READ)
        self._half_open: dict[int, _HalfOpen] = {}
        self._logged: set[tuple[str, str]] = set()
        self._logged_since = time.monotonic()
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
            calls = False
            for event, _ in self._select.select(self._listen()):
                if event.fileobj is self._woken:
                    return self._end()
                if event.fileobj is self._sock:
                    calls = True
                elif half_open := self._half_open.get(event.fd):
                    self._advance(half_open)
            # Last: one of them may have made room, or shown that it is not silent.
            if calls and self._room_in() <= 0:
                self._accept()
            self._expire()

    def _listen(self) -> float | None:
        """Await callers if there is room for one. Returns when to look again, in seconds."""
        left = self._room_in()
        if left <= 0 and not self._accepts:
            self._select.register(self._sock, selectors.EVENT_READ)
        elif left > 0 and self._accepts:
            self._select.unregister(self._sock)
        self._accepts = left <= 0
        if left > 0:
            return left
        return DEADLINE / 2 if self._half_open else None

    def _room_in(self) -> float:
        """Seconds until there is room for one more caller; 0 or less if there is."""
        if len(self._half_open) < HALF_OPEN:
            return 0.0
        return self._first_silent().silent_at - time.monotonic()

    def _first_silent(self) -> _HalfOpen:
        return min(self._half_open.values(), key=lambda each: each.silent_at)

    def _accept(self) -> None:
        try:
            sock, address = self._sock.accept()
        except OSError as e:
            if e.errno in EXHAUSTED:
                self._log("", f"no connection can be accepted: {in_words(e)}")
                time.sleep(EXHAUSTED_S)
            return
        if len(self._half_open) >= HALF_OPEN:
            self._drop(self._first_silent(), "too many half-open connections")
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        half_open = _HalfOpen(sock, address[0], acceptor(self._key, self._worker))
        self._half_open[sock.fileno()] = half_open
        self._select.register(sock, selectors.EVENT_READ)

    def _advance(self, half_open: _HalfOpen) -> None:
        try:
            outcome = half_open.advance()
        except LinkRefused as e:
            _read_out(half_open.sock)
            return self._close(half_open, f"refused: {in_words(e)}")
        except OSError as e:
            return self._drop(half_open, in_words(e))
        if outcome is None:
            return
        self._forget(half_open)
        try:
            self._admit(outcome[0], half_open.sock, outcome[1])
        except (OSError, RuntimeError) as e:  # closed while being answered, or no thread to be had
            half_open.sock.close()
            _log.warning("link of %s lost during the handshake: %s", outcome[0].worker, e)
        except Exception:  # a bug here must not end the thread, without which no peer gets in
            half_open.sock.close()
            _log.exception("link of %s lost during the handshake", outcome[0].worker)

    def _expire(self) -> None:
        now = time.monotonic()
        for half_open in [g for g in self._half_open.values() if now - g.since > DEADLINE]:
            self._drop(half_open, "did not complete the handshake in time")

    def _forget(self, half_open: _HalfOpen) -> None:
        self._select.unregister(half_open.sock)
        del self._half_open[half_open.sock.fileno()]

    def _drop(self, half_open: _HalfOpen, reason: str) -> None:
        """End a handshake by a reset: the caller may try again."""
        _reset(half_open.sock)
        self._close(half_open, f"dropped: {reason}")

    def _close(self, half_open: _HalfOpen, what: str) -> None:
        self._forget(half_open)
        half_open.sock.close()
        self._log(half_open.host, f"connection from {half_open.host} {what}")

    def _log(self, host: str, message: str) -> None:
        now = time.monotonic()
        if now - self._logged_since > LOGGED_S:
            self._logged.clear()
            self._logged_since = now
        if (host, message) not in self._logged and len(self._logged) < MOST_LOGGED:
            self._logged.add((host, message))
            _log.warning("%s", message)

    def _end(self) -> None:
        for half_open in list(self._half_open.values()):
            self._forget(half_open)
            _reset(half_open.sock)
            half_open.sock.close()
        self._select.close()
        self._sock.close()
        self._woken.close()


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def _read_out(sock: socket.socket) -> None:
    """Closing a connection with something unread would reset it."""
    with contextlib.suppress(OSError):
        for _ in range(MOST_UNREAD):
            if not sock.recv(4096):
                return
