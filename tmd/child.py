"""A child process that only its owner reaps.

asyncio reaps its children in a thread, but every signal sent through them polls them first: if one
has just ended, the poll takes its exit status away from the thread, which then warns of an unknown
child and reports 255. It is an error, too, if the loop closes before the thread has reported. Here
a pidfd reports the end, and the status is read in one place.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio.subprocess import Process

CHUNK = 65_536
LOOK_S = 0.05
"""Interval at which a child is polled if the kernel has no pidfds."""
_left: list[subprocess.Popen[bytes]] = []
"""Children that were given up and have not ended: a driver may hold them. Reaped once they do."""


class Child:
    """A process in a separate session. Closed by :meth:`end`, in the task that uses it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def start(
        cls,
        command: Sequence[str],
        *,
        stdin: bool = False,
        stderr: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """Its stdout is read with :meth:`read`; stdin and stderr are closed unless requested.

        Raises:
            OSError, ValueError: it cannot be started.
        """
        _left[:] = [process for process in _left if process.poll() is None]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if stderr else subprocess.DEVNULL,
            env=env,
            start_new_session=True,  # Ctrl-C at a terminal is for the parent
            bufsize=0,
        )
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def write(self, data: bytes) -> None:
        """Write a few bytes to its stdin.

        Raises:
            OSError: it has ended, or does not read.
        """
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), data)

    async def read(self) -> bytes:
        """Bytes from its stdout; empty once all writers have closed it."""
        assert self._process.stdout is not None
        return await _read(self._process.stdout.fileno())

    async def read_errors(self) -> bytes:
        """The same for stderr."""
        assert self._process.stderr is not None
        return await _read(self._process.stderr.fileno())

    async def status(self) -> int:
        """Its exit status once it has ended; negative: the signal that ended it."""
        while (status := self._process.poll()) is None:
            await _ended(self._process.pid)
        return status

    def abandon(self) -> None:
        """Kill it and close all pipes without a wait for its end, which :meth:`status` reports."""
        self._process.kill()
        self._close()

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    async def end(self, within_s: float, *, kill: bool = True) -> bool:
        """Close all pipes, kill it unless ``kill`` is false, and wait; returns whether it ended.

        A child that has not, for instance because a driver holds it, is left behind.
        """
        if kill:
            self._process.kill()
        self._close()
        try:
            async with asyncio.timeout(within_s):
                await self.status()
        except TimeoutError:
            return False
        finally:
            if self._process.poll() is None:
                _left.append(self._process)
        return True


def send(process: Process, number: int) -> None:
    """Signal a child of asyncio, unless it has ended, and leave its exit status to asyncio."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


async def _read(fd: int) -> bytes:
    await _readable(fd)
    with suppress(BlockingIOError):
        return os.read(fd, CHUNK)
    return await _read(fd)


async def _ended(pid: int) -> None:
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        await asyncio.sleep(LOOK_S)
        return
    try:
        await _readable(fd)
    finally:
        os.close(fd)


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)
