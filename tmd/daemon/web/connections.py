"""Bounds the connections: an idle one makes room for a new one.

If none is idle, a client makes room that does not read its answer. No other request that is being
answered is dropped for a new client. Slow answers have fewer places than there are connections, so
a health probe is always admitted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec import Struct


class ConnectionLimits(Struct, frozen=True):
    """Limits of the listener."""

    connections: int = 64
    first_s: float = 10.0
    """From the connection to the end of the headers of its first request."""
    next_s: float = 15.0
    """From an answer to the end of the headers of the next request."""
    answer_s: float = 30.0
    """From the headers of a request, over its body, to the last byte of the answer."""


class BoundedConnection(asyncio.Protocol):
    """One connection; every event is passed on to the HTTP handler."""

    def __init__(self, connections: Connections, handler: asyncio.Protocol) -> None:
        self.handler = handler
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.unread_since: float | None = None
        """Loop time since which the answer waits for the client to read."""

    def drop(self) -> None:
        """Close at once, without waiting for the client to read."""
        self.expect_within(None)
        self._connections.closed(self)
        if self._transport is not None:
            self._transport.abort()

    def expect_within(self, seconds: float | None) -> None:
        """Set the deadline of the next request; ``None``: no deadline."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = None if seconds is None else loop.call_later(seconds, self.drop)

    # --- what asyncio calls -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self not in self._connections:  # dropped for a newer connection before it began
            transport.abort()
        self.handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self.handler.eof_received()

    def pause_writing(self) -> None:
        self.unread_since = asyncio.get_running_loop().time()
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        self.unread_since = None
        self.handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.expect_within(None)
        self._connections.closed(self)
        self.handler.connection_lost(exc)


class Connections:
    """All open connections."""

    def __init__(self, handlers: Callable[[], asyncio.Protocol], limits: ConnectionLimits) -> None:
        self._handlers = handlers
        self._limits = limits
        self._waiting: dict[BoundedConnection, None] = {}
        """Connections without a complete request, the longest waiting first."""
        self._answered: dict[asyncio.Protocol, BoundedConnection] = {}
        """Connections with a request being answered, by HTTP handler."""

    def __contains__(self, connection: BoundedConnection) -> bool:
        return connection in self._waiting or connection.handler in self._answered

    def welcome(self) -> asyncio.BaseProtocol:
        """The protocol of a new connection."""
        if len(self._waiting) + len(self._answered) >= self._limits.connections:
            longest = next(iter(self._waiting), None) or self._unread()
            if longest is None:
                return _Full()
            longest.drop()
        connection = BoundedConnection(self, self._handlers())
        self._waiting[connection] = None
        connection.expect_within(self._limits.first_s)
        return connection

    def _unread(self) -> BoundedConnection | None:
        """The connection whose client has not read for longest, if any."""
        unread = [c for c in self._answered.values() if c.unread_since is not None]
        return min(unread, key=lambda c: c.unread_since or 0.0, default=None)

    @contextmanager
    def answering(self, handler: asyncio.Protocol) -> Iterator[None]:
        """Context in which ``handler`` answers a request."""
        connection = next((g for g in self._waiting if g.handler is handler), None)
        if connection is None:  # the connection has closed
            yield
            return
        connection.expect_within(None)
        del self._waiting[connection]
        self._answered[handler] = connection
        try:
            yield
        finally:
            if self._answered.pop(handler, None) is not None:
                self._waiting[connection] = None
                connection.expect_within(self._limits.next_s)

    def closed(self, connection: BoundedConnection) -> None:
        """Stop counting the connection."""
        self._waiting.pop(connection, None)
        self._answered.pop(connection.handler, None)


class _Full(asyncio.Protocol):
    """Closes a connection beyond the limit at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
