"""Relays connections, so that it can delay, stall, cut or reset them.

Not every kernel has a queue that delays or loses packets. The relay shows a TCP connection the
effects of such a network without one, and without privileges.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

StreamPair = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Dial = Callable[[], Awaitable[StreamPair]]
PIECE = 1 << 16
RESET = struct.pack("ii", 1, 0)


class LinkConditions:
    """How the connections that one side opens behave, including those already open."""

    def __init__(self) -> None:
        self.flows_there = asyncio.Event()
        """Set while what the dialling side sends arrives."""
        self.flows_back = asyncio.Event()
        """Set while answers arrive."""
        self.delay_s = 0.0
        self.bytes_s = 0.0
        """Limit in bytes per second; 0 for none."""
        self.refuse = False
        self.passed = 0
        """Bytes that have passed since the last :meth:`clear`."""
        self._open: set[asyncio.StreamWriter] = set()
        self.clear()

    def clear(self) -> None:
        """Remove all effects."""
        self.flows_there.set()
        self.flows_back.set()
        self.delay_s = self.bytes_s = 0.0
        self.refuse = False
        self.passed = 0

    def stall_there(self) -> None:
        """What the dialling side sends no longer arrives."""
        self.flows_there.clear()

    def stall_back(self) -> None:
        """Answers no longer arrive."""
        self.flows_back.clear()

    def stall(self) -> None:
        """Connections stay open but carry nothing."""
        self.stall_there()
        self.stall_back()

    def reset(self) -> int:
        """Reset every open connection; returns their number."""
        found = [w for w in self._open if not w.is_closing()]
        for writer in found:
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                if sock.family != socket.AF_UNIX:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()
        return len(found)

    async def carry(
        self, near: tuple[asyncio.StreamReader, asyncio.StreamWriter], dial: Dial
    ) -> None:
        """Serve one connection to its end; ``near`` is the dialling side."""
        try:
            far = None if self.refuse else await dial()
        except OSError:
            far = None
        if far is None:
            near[1].transport.abort()
            return
        self._open |= {near[1], far[1]}
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(near[0], far[1], self.flows_there))
                both.create_task(self._pump(far[0], near[1], self.flows_back))
        finally:
            self._open -= {near[1], far[1]}
            near[1].transport.abort()
            far[1].transport.abort()

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, way: asyncio.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(PIECE):
                if not way.is_set() or self.delay_s or self.bytes_s:
                    self.passed += len(data)
                await way.wait()
                if self.delay_s or self.bytes_s:
                    await asyncio.sleep(self.delay_s + len(data) / (self.bytes_s or 1e12))
                target.write(data)
                await target.drain()
            with contextlib.suppress(OSError):
                target.write_eof()


class LinkEffect(NamedTuple):
    """What happens to all connections of a host: to those that it dials, and to those to it."""

    host: str
    on_dials: Callable[[LinkConditions], None]
    on_dialled: Callable[[LinkConditions], None]


class RelayedLinks:
    """The conditions of the connections from each host to each other one."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, str], LinkConditions] = {}
        self._effects: list[LinkEffect] = []

    def between(self, dials: str, dialled: str) -> LinkConditions:
        """The conditions of connections that host ``dials`` opens to ``dialled``. Effects apply to
        hosts that meet later, too."""
        if (dials, dialled) not in self._pairs:
            self._pairs[dials, dialled] = found = LinkConditions()
            for effect in self._effects:
                _apply(effect, dials, dialled, found)
        return self._pairs[dials, dialled]

    def of(self, host: str) -> list[LinkConditions]:
        """Those of ``host`` in use, in both directions."""
        return [found for pair, found in self._pairs.items() if host in pair]

    def begin(self, effect: LinkEffect) -> None:
        self._effects.append(effect)
        for (dials, dialled), found in self._pairs.items():
            _apply(effect, dials, dialled, found)

    def end(self, effect: LinkEffect) -> None:
        """Idempotent."""
        if effect in self._effects:
            self._effects.remove(effect)
            for found in self.of(effect.host):
                found.clear()


def _apply(effect: LinkEffect, dials: str, dialled: str, conditions: LinkConditions) -> None:
    if effect.host == dials:
        effect.on_dials(conditions)
    elif effect.host == dialled:
        effect.on_dialled(conditions)


def _dialling(target: Path | str) -> Dial:
    if isinstance(target, Path):
        return partial(asyncio.open_unix_connection, target)
    host, _, port = target.rpartition(":")
    return partial(asyncio.open_connection, host, int(port))


class Relay:
    """Listening sockets of the relay; all are closed on leaving the context."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def unix(self, path: Path, target: Path | str, conditions: LinkConditions) -> None:
        """Relay connections to ``path`` to ``target``, a Unix socket or ``<host>:<port>``."""
        serving = self._serving(conditions, _dialling(target))
        server = await asyncio.start_unix_server(serving, path)
        self._servers.append(server)

    async def tcp(self, address: str, conditions: LinkConditions) -> int:
        """Relay connections to a loopback port, which is returned, to ``address``."""
        serving = self._serving(conditions, _dialling(address))
        server = await asyncio.start_server(serving, "127.0.0.1", 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def answering(self, path: Path, answer: Callable[[str], Awaitable[str]]) -> None:
        """Answer questions of one line at ``path`` with one line."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                question = (await reader.readline()).decode().strip()
                writer.write((await answer(question) + "\n").encode())
                await writer.drain()
            writer.close()

        self._servers.append(await asyncio.start_unix_server(serve, path))

    def _serving(
        self, conditions: LinkConditions, dial: Dial
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(conditions.carry((reader, writer), dial))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return serve
