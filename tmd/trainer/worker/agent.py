"""The thread that talks to the daemon of this host, so that the main thread never waits for it.

It repeats the current status as a heartbeat, sends changes at once, and keeps the latest directive.
The daemon may die at any time: the thread reconnects with back-off, and training continues.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path

from tmd import wire
from tmd.core.planning.directives import Directive
from tmd.core.values.errors import TmdError, WireError
from tmd.core.values.model import WorkerStatus
from tmd.core.values.reasons import in_words
from tmd.folders import refuse_impostor
from tmd.robust_futex import ExitBeacon

HEARTBEAT_S = 0.5
REMIND_S = 3600.0
LASTING_S = 10.0
"""Once a connection has lasted so long the daemon counts as reached again."""
RECONNECT_S = (0.05, 1.0)
"""First and longest pause between attempts to reach the daemon."""

PATIENCE_S = 30.0
"""Longest wait for the first answer of the daemon."""

log = logging.getLogger("tmd.trainer")


class Agent:
    """Owns the connection to the daemon.

    Args:
        path: the daemon's Unix socket.
        current: returns the current status; called in the agent's thread.
        on_directive: called in the agent's thread with each new directive.
        futex: held by this process until it ends, if the kernel grants one.
        lasting_s: see :data:`LASTING_S`.

    Raises:
        TmdError: (from :meth:`introduce`) no daemon answers on ``path``, or it rejects this worker.
    """

    def __init__(
        self,
        path: Path,
        current: Callable[[], WorkerStatus],
        on_directive: Callable[[Directive], None],
        futex: ExitBeacon | None = None,
        lasting_s: float = LASTING_S,
    ) -> None:
        self._path = path
        self._lasting_s = lasting_s
        self._futex = futex
        self._current = current
        self._on_directive = on_directive
        self._directive: Directive | None = None
        self._obeyed = 0
        self._changed = threading.Condition()
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_out, False)
        self._closed = False
        self._complained: dict[str, float] = {}
        """Why the daemon cannot be reached, and when each reason was logged (monotonic seconds)."""
        self._thread = threading.Thread(target=self._run, name="tmd-agent", daemon=True)

    def introduce(self, patience_s: float = PATIENCE_S) -> wire.Welcome:
        """Connect for the first time; returns the daemon's welcome.

        ``patience_s``: longest wait for the daemon, which starts together with its host.
        """
        deadline = time.monotonic() + patience_s
        pause = RECONNECT_S[0]
        while True:
            try:
                self._first, welcome = self._connect()
                return welcome
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise TmdError(
                        f"no tmd daemon answers on {self._path} ({in_words(error)}): is it "
                        "running? see 'tmd daemon' and TMD_SOCKET"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, RECONNECT_S[1])

    def start(self) -> None:
        """Begin to report and to listen."""
        self._thread.start()

    @property
    def directive(self) -> Directive | None:
        """The latest directive; ``None`` before the first one."""
        return self._directive

    def wait_a_while(self, wanted: Callable[[Directive], bool], seconds: float) -> Directive | None:
        """Like :meth:`wait_until`, but ``None`` after ``seconds``."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._directive is not None and wanted(self._directive), timeout=seconds
            )
            return (
                self._directive if self._directive is not None and wanted(self._directive) else None
            )

    def wait_until(self, wanted: Callable[[Directive], bool]) -> Directive:
        """Wait for a directive for which ``wanted`` holds."""
        with self._changed:
            while self._directive is None or not wanted(self._directive):
                self._changed.wait()
            return self._directive

    def tell(self) -> None:
        """Report the status now, not with the next heartbeat."""
        os.write(self._wake_in, b"x")

    def close(self) -> None:
        """Report the last status and stop."""
        if self._closed or not self._thread.is_alive():
            return
        self._closed = True
        self.tell()
        self._thread.join(timeout=2)

    def _connect(self) -> tuple[socket.socket, wire.Welcome]:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(5)
            connection.connect(str(self._path))
            refuse_impostor(connection, self._path)
            self._greet(connection)
            reply = _receive(connection)
        except BaseException:
            connection.close()
            raise
        if isinstance(reply, wire.Welcome):
            return connection, reply
        connection.close()
        reason = reply.reason if isinstance(reply, wire.Rejected) else "unexpected answer"
        raise TmdError(f"the tmd daemon on {self._path} rejected this worker: {reason}")

    def _greet(self, connection: socket.socket) -> None:
        futex = self._futex
        thread, handed = (futex.thread, [futex.fd]) if futex is not None else (0, [])
        hello = wire.encode(wire.TrainerHello(wire.VERSION, self._current(), self._obeyed, thread))
        sent = socket.send_fds(connection, [hello], handed)
        # Even sending nothing fails once the daemon has answered and closed the connection.
        if sent < len(hello):
            connection.sendall(hello[sent:])

    def _run(self) -> None:
        connection: socket.socket | None = self._first
        pause = RECONNECT_S[0]
        while not self._closed:
            began = time.monotonic()
            try:
                if connection is None:
                    connection, _ = self._connect()
                self._serve(connection)
            except (OSError, WireError, TmdError) as error:
                self._complain(in_words(error))
            except Exception:
                # Without this thread no failover could halt the rank.
                log.exception("the connection to the daemon failed, training continues")
            finally:
                if connection is not None:
                    connection.close()
                    connection = None
            if time.monotonic() - began > RECONNECT_S[1]:
                pause = RECONNECT_S[0]
            if not self._closed:
                time.sleep(pause)
                pause = min(2 * pause, RECONNECT_S[1])

    def _complain(self, why: str) -> None:
        """Log why there is no daemon: each reason once, and every hour, since it may be away for
        days."""
        now = time.monotonic()
        if now - self._complained.get(why, -inf) >= REMIND_S:
            log.warning("the daemon cannot be reached, training continues: %s", why)
            self._complained[why] = now

    def _serve(self, connection: socket.socket) -> None:
        began = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self._wake_out, selectors.EVENT_READ)
            while True:
                connection.sendall(wire.encode(wire.StatusReport(self._current())))
                if self._closed:
                    return
                self._listen(selector, connection)
                if self._complained and time.monotonic() - began >= self._lasting_s:
                    log.info("the daemon is reached again")
                    self._complained.clear()

    def _listen(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        """Receive directives until there is something to report."""
        deadline = time.monotonic() + HEARTBEAT_S
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fd == self._wake_out:
                    os.read(self._wake_out, 4096)
                    return
                self._obey(_receive(connection))

    def _obey(self, message: wire.Message) -> None:
        if isinstance(message, wire.Rejected):
            raise TmdError(f"the tmd daemon rejected this worker: {message.reason}")
        if not isinstance(message, wire.DirectiveOrder):
            raise WireError(f"unexpected {type(message).__name__} from the daemon")
        if message.lease_epoch < self._obeyed:
            log.warning("refused a directive of older leader %d", message.lease_epoch)
            return
        self._obeyed = message.lease_epoch
        with self._changed:
            self._directive = message.directive
            try:
                self._on_directive(message.directive)
            finally:
                # After an error, too: the main thread may wait for this directive.
                self._changed.notify_all()


def _receive(connection: socket.socket) -> wire.Message:
    size = wire.body_size(_exactly(connection, wire.HEADER_SIZE), wire.MAX_DIRECTIVE)
    return wire.decode(_exactly(connection, size))


def _exactly(connection: socket.socket, size: int) -> bytes:
    buffer = bytearray()
    while len(buffer) < size:
        part = connection.recv(size - len(buffer))
        if not part:
            raise ConnectionResetError("the daemon closed the connection")
        buffer += part
    return bytes(buffer)
