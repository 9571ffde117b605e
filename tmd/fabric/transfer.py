"""Moves bytes over links: the inner loop of every collective.

Blocking sockets and few system calls: a thread sleeps in ``recv`` until its data arrives, and
``Link.sever`` from another thread wakes it. Polling is used only if sending and receiving must
overlap and the socket buffers are too small.
"""

from __future__ import annotations

import select
from array import array
from collections import deque
from collections.abc import Iterator
from fcntl import ioctl
from math import inf
from socket import MSG_DONTWAIT
from termios import FIONREAD

from tmd.core.values.errors import LinkError
from tmd.fabric.frame import BYE, HEADER_SIZE, check
from tmd.fabric.link import LONGEST_POLL_MS, Link


class PeerLost(LinkError):
    """The link to ``worker`` broke: that worker is the suspect."""

    def __init__(self, worker: str, reason: object) -> None:
        super().__init__(f"link to {worker} broke: {reason}")
        self.worker = worker


class PeerLate(LinkError):
    """No byte moved within the group's time-out; the peer may be alive."""

    def __init__(self, worker: str) -> None:
        super().__init__(f"no data from {worker} within the time-out of the group")


SEGMENT = 128 << 10
"""Bytes reduced or forwarded at a time: few enough to stay in the cache."""

_CLOSED = "closed by the other side"


def send(link: Link, header: bytes, payload: memoryview) -> None:
    """Send one message; return when the kernel has all of it."""
    try:
        sent = link.sock.sendmsg((header, payload))
        if sent < HEADER_SIZE:
            link.sock.sendall(header[sent:])
            sent = HEADER_SIZE
        if sent < HEADER_SIZE + len(payload):
            link.sock.sendall(payload[sent - HEADER_SIZE :])
    except BlockingIOError as e:
        raise PeerLate(link.peer) from e
    except OSError as e:
        raise PeerLost(link.peer, e) from e


def receive(link: Link, expected: bytes, into: memoryview) -> None:
    """Receive one message of exactly ``len(into)`` bytes with the ``expected`` header."""
    head = link.head
    try:
        have = link.sock.recvmsg_into((head, into))[0]
    except BlockingIOError as e:
        raise PeerLate(link.peer) from e
    except OSError as e:
        raise PeerLost(link.peer, e) from e
    if have == HEADER_SIZE + len(into) and head == expected:
        return
    # The header is checked before more is read: the rest may be another message.
    while have < HEADER_SIZE:
        have += receive_some(link, head[have:])
    _check(link, expected)
    while have < HEADER_SIZE + len(into):
        have += receive_some(link, into[have - HEADER_SIZE :])


def _check(link: Link, expected: bytes) -> None:
    if link.head == BYE:
        raise PeerLost(link.peer, _CLOSED)
    check(link.head, expected, link.peer)


def receive_some(link: Link, into: memoryview) -> int:
    """Receive at least one byte; return how many."""
    try:
        n = link.sock.recv_into(into)
    except BlockingIOError as e:
        raise PeerLate(link.peer) from e
    except OSError as e:
        raise PeerLost(link.peer, e) from e
    if n == 0:
        raise PeerLost(link.peer, _CLOSED)
    return n


def receive_within(link: Link, into: memoryview, patience_s: float) -> None:
    """Fill ``into``. Raises PeerLate once no byte has moved for ``patience_s``."""
    ready: select.poll | None = None
    while into:
        got = _pull(link, into, wait=patience_s == inf)
        into = into[got:]
        if not got:
            if ready is None:
                ready = select.poll()
                ready.register(link.sock, select.POLLIN)
            if not ready.poll(min(patience_s * 1000, LONGEST_POLL_MS)):
                raise PeerLate(link.peer)


def swap(
    out: Link, header: bytes, payload: memoryview, inp: Link, expected: bytes, into: memoryview
) -> None:
    """Send one message and receive another at the same time (the two links may be one)."""
    try:
        sent = out.sock.sendmsg((header, payload), (), MSG_DONTWAIT)
    except BlockingIOError:
        sent = 0
    except OSError as e:
        raise PeerLost(out.peer, e) from e
    if sent == HEADER_SIZE + len(payload):
        return receive(inp, expected, into)
    rest = deque([payload[max(0, sent - HEADER_SIZE) :]])
    if sent < HEADER_SIZE:
        rest.appendleft(memoryview(header)[sent:])
    return pump(out, rest, inp, iter((into,)) if len(into) else iter(()), expected)


def pump(
    out: Link,
    queue: deque[memoryview],
    inp: Link,
    arrivals: Iterator[memoryview | None],
    expected: bytes | None,
    unit: int = 1,
) -> None:
    """Send all of ``queue`` while receiving ``expected`` and then each buffer of ``arrivals``.

    ``expected`` is the header of the incoming message; ``None`` if it was read or none comes.

    ``arrivals`` resumes when its last buffer is full; it may process the data and append to
    ``queue``. It yields ``None`` to be resumed after something has been sent.

    ``unit``: bytes that are written into a buffer of ``arrivals`` together or not at all, even if
    the link breaks in the middle of them; the length of each buffer is a multiple.

    Raises LinkError, with the number of bytes that had come in ``arrived``.
    """
    incoming = _with_header(inp, expected, arrivals)
    view, more = _next(incoming)
    ready = _readiness(out, inp)
    arrived = 0 if expected is None else -HEADER_SIZE
    pull = _pull if unit == 1 else _WholeUnits(unit).pull
    try:
        while queue or more:
            moved = _push(out, queue, wait=view is None) if queue else 0
            if view is not None:
                # Until the header is here it is negative.
                got = (pull if arrived >= 0 else _pull)(inp, view, wait=not queue)
                view = view[got:]
                moved += got
                arrived += got
            if more and not view:
                view, more = _next(incoming)
            elif not moved and not ready.poll(inp.timeout_ms):
                raise PeerLate(inp.peer)
    except LinkError as error:
        error.arrived = max(0, arrived)
        raise


def _next(incoming: Iterator[memoryview | None]) -> tuple[memoryview | None, bool]:
    """The next buffer to fill, and whether ``incoming`` yielded."""
    for view in incoming:
        return view, True
    return None, False


def _with_header(
    inp: Link, expected: bytes | None, arrivals: Iterator[memoryview | None]
) -> Iterator[memoryview | None]:
    if expected is not None:
        yield inp.head
        _check(inp, expected)
    for view in arrivals:
        # An empty buffer is full at once; reading into it would look like the end of the stream.
        if view is None or len(view):
            yield view


def _readiness(out: Link, inp: Link) -> select.poll:
    ready = select.poll()
    ready.register(out.sock, select.POLLOUT)
    # Registering the same descriptor twice would replace the first mask.
    same = select.POLLOUT if out is inp else 0
    ready.register(inp.sock, select.POLLIN | same)
    return ready


def _push(out: Link, queue: deque[memoryview], *, wait: bool) -> int:
    head = queue[0]
    try:
        # A blocking send is kept short: nothing is received during it.
        sent = out.sock.send(head[:SEGMENT], 0) if wait else out.sock.send(head, MSG_DONTWAIT)
    except BlockingIOError as e:
        if wait:
            raise PeerLate(out.peer) from e
        return 0
    except OSError as e:
        raise PeerLost(out.peer, e) from e
    if sent == len(head):
        queue.popleft()
    else:
        queue[0] = head[sent:]
    return sent


def _pull(inp: Link, into: memoryview, *, wait: bool) -> int:
    try:
        n = inp.sock.recv_into(into, 0, 0 if wait else MSG_DONTWAIT)
    except BlockingIOError as e:
        if wait:
            raise PeerLate(inp.peer) from e
        return 0
    except OSError as e:
        raise PeerLost(inp.peer, e) from e
    if n == 0:
        raise PeerLost(inp.peer, _CLOSED)
    return n


class _WholeUnits:
    """Receives whole units: a part of one waits beside its buffer for the rest."""

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._part = memoryview(bytearray(unit))
        self._have = 0
        """Bytes of ``_part``."""
        self._available = array("i", [0])

    def pull(self, inp: Link, into: memoryview, *, wait: bool) -> int:
        """As :func:`_pull`. Returns the number of bytes written to ``into``, perhaps none."""
        if not self._have:
            try:
                ioctl(inp.sock, FIONREAD, self._available)
            except (OSError, ValueError) as e:
                raise PeerLost(inp.peer, e) from e
            whole = min(self._available[0], len(into)) // self._unit * self._unit
            if whole:
                return _pull(inp, into[:whole], wait=wait)
        self._have += _pull(inp, self._part[self._have :], wait=wait)
        if self._have < self._unit:
            return 0
        into[: self._unit] = self._part
        self._have = 0
        return self._unit
