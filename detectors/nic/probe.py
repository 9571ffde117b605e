"""The reading in a process of its own.

A driver whose device is wedged may keep a reader of sysfs for as long as it likes, and no signal
ends it. So the daemon asks a child, waits a bounded time, and leaves a child that does not answer
to the kernel.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from pathlib import Path

import msgspec

from tmd.plugin import bare_python

from .child import Request
from .snapshot import Snapshot

CHILD = Path(__file__).with_name("child.py")
LONGEST_ANSWER = 1 << 22
END_S = 1.0


class Probe:
    """Owns the child. Closed by :meth:`close`."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._child: Process | None = None

    async def read(self, timeout_s: float) -> Snapshot | None:
        """A snapshot, or ``None`` if there was no answer in time or none that makes sense.

        The child is then given up; the next call starts another.
        """
        try:
            async with asyncio.timeout(timeout_s):
                child = self._child or await self._start()
                assert child.stdin is not None
                assert child.stdout is not None
                child.stdin.write(b"\n")
                await child.stdin.drain()
                return msgspec.json.decode(await child.stdout.readline(), type=Snapshot)
        except (OSError, ValueError, msgspec.DecodeError):  # a TimeoutError is an OSError
            await self.close()
            return None

    async def _start(self) -> Process:
        self._child = await asyncio.create_subprocess_exec(
            *bare_python(CHILD, msgspec.json.encode(self._request).decode()),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            limit=LONGEST_ANSWER,
            start_new_session=True,  # Ctrl-C at a terminal is for us
        )
        return self._child

    async def close(self) -> None:
        """End the child; wait for its end only so long as one that is able to end takes."""
        child, self._child = self._child, None
        if child is None:
            return
        with suppress(ProcessLookupError):
            child.kill()
        assert child.stdin is not None
        child.stdin.close()
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(END_S):
                await child.communicate()
