"""One authenticated connection between two workers.

Collectives read and write the socket themselves (:mod:`tmd.fabric.transfer`); raw links use the
methods here. Any thread may call ``sever``, which wakes blocked threads. The descriptor is closed
only when no thread is inside a call, so its number cannot be reused under one.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from struct import Struct, pack

from tmd.core.values.errors import LinkError
from tmd.core.values.reasons import in_words
from tmd.fabric import silence
from tmd.fabric.frame import HEADER_SIZE

Buffer = bytes | bytearray | memoryview

_LENGTH = Struct("<Q")
_KEEPALIVE = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Options of every connection. They end an idle one whose peer's host has vanished; one with data
in flight is left to :mod:`tmd.fabric.silence`."""
LONGEST_POLL_MS = 2**31 - 1
"""``select.poll`` takes no longer time-out."""
LOCAL_BUFFER = 512 << 10
"""Send buffer within a host: data in flight must stay in the cache (measured: -20 % at 25 MB).
Across hosts the kernel's choice is better."""


def keep_alive(sock: socket.socket) -> None:
    """Set the options of every connection, before it is waited for."""
    for level, option, value in _KEEPALIVE:
        sock.setsockopt(level, option, value)


class Link:
    """A byte stream to ``peer``. Closed by its holder, or with its epoch."""

    def __init__(self, sock: socket.socket, peer: str, dialer: str, epoch: int = -1) -> None:
        sock.setblocking(True)
        keep_alive(sock)
        if sock.getpeername()[0] == sock.getsockname()[0]:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER)
        self.sock = sock
        self.peer = peer
        self.dialer = dialer
        self.epoch = epoch
        self.severed = False
        self.head = memoryview(bytearray(HEADER_SIZE))
        self.timeout_ms: float | None = None
        self._lock = threading.Lock()
        self._users = 0
        silence.WATCH.add(self)

    @property
    def ended(self) -> bool:
        """Whether the other side has closed it; for a link with nothing in flight."""
        try:
            return self.severed or not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def patience(self, seconds: float) -> None:
        """Fail reads and writes that see no byte move for this long; 0 waits forever."""
        self.timeout_ms = min(seconds * 1000, LONGEST_POLL_MS) if seconds else None
        whole = int(seconds)
        value = pack("@ll", whole, int((seconds - whole) * 1e6))
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def sever(self) -> None:
        """Cut the connection; threads blocked in it wake up with an error."""
        self.severed = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    @property
    def quiet_s(self) -> float:
        """Seconds since a byte arrived. Raises LinkError if it is closed."""
        with self.in_use() as sock:
            return silence.parsed(silence.tcp_info(sock)).last_data_ms / 1000

    def receive_no_more(self) -> None:
        """Stop receiving. Data that has arrived can still be read; then the link looks closed.

        Raises LinkError if it is closed.
        """
        with self.in_use() as sock:
            sock.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Sever, and release the descriptor once no thread is inside a call."""
        self.sever()
        with self._lock:
            if self._users == 0:
                self.sock.close()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[socket.socket]:
        """Keep the descriptor open during a call; raises LinkError if it is closed."""
        with self._lock:
            if self.severed:
                raise LinkError(f"link to {self.peer} is closed")
            self._users += 1
        try:
            yield self.sock
        except OSError as e:
            raise LinkError(f"link to {self.peer} broke: {in_words(e)}") from e
        finally:
            with self._lock:
                self._users -= 1
                if self.severed and self._users == 0:
                    self.sock.close()

    def send(self, data: Buffer) -> None:
        """Send all of ``data``; raises LinkError if the link broke or was closed."""
        with self.in_use() as sock:
            sock.sendall(data)

    def recv_into(self, into: bytearray | memoryview) -> None:
        """Fill all of ``into``; raises LinkError if the link broke or was closed."""
        view = memoryview(into).cast("B")
        with self.in_use() as sock:
            while view:
                n = sock.recv_into(view)
                if n == 0:
                    raise LinkError(f"link to {self.peer} was closed by the other side")
                view = view[n:]

    def send_frame(self, data: Buffer) -> None:
        """Send ``data`` as one message."""
        with memoryview(data) as view:
            self.send(_LENGTH.pack(view.nbytes))
            self.send(view)

    def recv_frame(self, limit: int) -> bytes:
        """Receive one message of at most ``limit`` bytes; raises LinkError if it is larger."""
        raw = bytearray(_LENGTH.size)
        self.recv_into(raw)
        (size,) = _LENGTH.unpack(raw)
        if size > limit:
            raise LinkError(f"{self.peer} sent a message of {size} bytes, limit {limit}")
        data = bytearray(size)
        self.recv_into(data)
        return bytes(data)
