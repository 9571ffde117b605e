"""Runs the reader in a process of its own.

A driver with a wedged device may block a reader of sysfs forever, and no signal ends it. So the
daemon asks a child, waits for a bounded time, and leaves a child that does not answer to the
kernel.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from tmd.plugin import Child, bare_python

from .child import ReaderArguments
from .snapshot import Snapshot

CHILD = Path(__file__).with_name("child.py")
LONGEST_ANSWER = 1 << 22
END_S = 1.0
ABANDONED = 3
"""Most children that do not die: each keeps memory, and another would hang as well."""


class NicProbe:
    """Owns the child. Closed by :meth:`close`."""

    def __init__(self, request: ReaderArguments) -> None:
        self._request = request
        self._child: Child | None = None
        self._buffer = b""
        self._abandoned: list[Child] = []

    async def read(self, timeout_s: float) -> Snapshot | None:
        """A snapshot, or ``None`` if there was no valid answer in time.

        The child is then abandoned; the next call starts another, unless too many hang.
        """
        self._abandoned = [child for child in self._abandoned if child.runs]
        if len(self._abandoned) >= ABANDONED:
            return None
        try:
            async with asyncio.timeout(timeout_s):
                child = self._child or self._start()
                child.write(b"\n")
                snapshot = msgspec.json.decode(await self._line(child), type=Snapshot)
        except (OSError, ValueError, msgspec.DecodeError):  # a TimeoutError is an OSError
            await self.close()
            return None
        self._request = self._request.after(snapshot)
        return snapshot

    def _start(self) -> Child:
        command = bare_python(CHILD, msgspec.json.encode(self._request).decode())
        self._child, self._buffer = Child.start(command, stdin=True), b""
        return self._child

    async def _line(self, child: Child) -> bytes:
        while b"\n" not in self._buffer:
            chunk = await child.read()
            if not chunk or len(self._buffer) > LONGEST_ANSWER:
                raise ValueError("the child ended or its answer is too long")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    async def close(self) -> None:
        """End the child; wait only as long as a live one needs to end."""
        child, self._child = self._child, None
        if child is not None and not await child.end(END_S):
            self._abandoned.append(child)
