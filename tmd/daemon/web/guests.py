"""Connections: so many at a time, and whoever only keeps one open makes room for whoever comes.

What is being answered is never dropped for a newcomer. There are fewer places for answers that take
time than there are connections, so a health probe is always let in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec import Struct


class Patience(Struct, frozen=True):
    """Bounds of the listener."""

    connections: int = 64
    first_s: float = 10.0
    """From the connection to the end of the headers of its first request."""
    next_s: float = 15.0
    """From an answer to the end of the headers of the next request."""
    answer_s: float = 30.0
    """From the headers of a request, over its body, to the last byte of the answer."""


class Guest(asyncio.Protocol):
    """One connection: all that happens is passed on to the handler of HTTP."""

    def __init__(self, guests: Guests, handler: asyncio.Protocol) -> None:
        self.handler = handler
        self._guests = guests
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def drop(self) -> None:
        """Close at once, without waiting for the client to read what was sent."""
        self.expect_within(None)
        self._guests.gone(self)
        if self._transport is not None:
            self._transport.abort()

    def expect_within(self, seconds: float | None) -> None:
        """The next request; ``None``: one is being answered, or there will be none."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = None if seconds is None else loop.call_later(seconds, self.drop)

    # --- what asyncio calls -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self not in self._guests:  # dropped for a newcomer before it began
            transport.abort()
        self.handler.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self.handler.eof_received()

    def pause_writing(self) -> None:
        self.handler.pause_writing()

    def resume_writing(self) -> None:
        self.handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.expect_within(None)
        self._guests.gone(self)
        self.handler.connection_lost(exc)


class Guests:
    """All open connections."""

    def __init__(self, handlers: Callable[[], asyncio.Protocol], patience: Patience) -> None:
        self._handlers = handlers
        self._patience = patience
        self._waiting: dict[Guest, None] = {}
        """No whole request has come: the one that has waited longest first."""
        self._answered: dict[asyncio.Protocol, Guest] = {}
        """By the handler of HTTP: a request is being answered."""

    def __contains__(self, guest: Guest) -> bool:
        return guest in self._waiting or guest.handler in self._answered

    def welcome(self) -> asyncio.BaseProtocol:
        """The protocol of a new connection."""
        if len(self._waiting) + len(self._answered) >= self._patience.connections:
            longest = next(iter(self._waiting), None)
            if longest is None:
                return _Full()
            longest.drop()
        guest = Guest(self, self._handlers())
        self._waiting[guest] = None
        guest.expect_within(self._patience.first_s)
        return guest

    @contextmanager
    def answering(self, handler: asyncio.Protocol) -> Iterator[None]:
        """Within: a request that came to ``handler`` is being answered."""
        guest = next((g for g in self._waiting if g.handler is handler), None)
        if guest is None:  # it has gone meanwhile
            yield
            return
        guest.expect_within(None)
        del self._waiting[guest]
        self._answered[handler] = guest
        try:
            yield
        finally:
            if self._answered.pop(handler, None) is not None:
                self._waiting[guest] = None
                guest.expect_within(self._patience.next_s)

    def gone(self, guest: Guest) -> None:
        """It is not counted any more."""
        self._waiting.pop(guest, None)
        self._answered.pop(guest.handler, None)


class _Full(asyncio.Protocol):
    """There are enough connections: this one is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
