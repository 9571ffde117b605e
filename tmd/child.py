"""A child process that only its owner reaps.

asyncio reaps its children in a thread, but every signal sent through them polls them first: if one
has just ended, the poll takes its exit status away from the thread, which then warns of an unknown
child and reports 255. It is an error, too, if the loop closes before the thread has reported. Here
a pidfd reports the end, and the status is read in one place.

A child is reaped only once it has been killed or left to itself: until then its pid, which is also
that of its process group, cannot belong to others.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio.subprocess import Process

CHUNK = 65_536
LOOK_S = 0.05
"""Interval at which a child is polled if the kernel has no pidfds."""
_left: list[subprocess.Popen[bytes]] = []
"""Children that were given up and have not ended: a driver may hold them. Reaped once they do."""


def without_secrets() -> dict[str, str]:
    """The environment without variables ``TMD_...``, which may contain secrets of the daemon."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TMD_")}


class Child:
    """A process in a session of its own. Closed by :meth:`end`, in the task that uses it.

    It is killed with its process group: with all that it has started, such as the tool below a
    wrapper script. A process that has made a session or a process group of its own escapes, such as
    one that became a daemon, and so does one of another user.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._released = False
        """Whether it may be reaped."""

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
        Without ``env`` it gets the environment of this process, less variables ``TMD_...``.

        Raises:
            OSError, ValueError: it cannot be started.
        """
        _left[:] = [process for process in _left if process.poll() is None]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if stderr else subprocess.DEVNULL,
            env=without_secrets() if env is None else env,
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
        return self._status() is None

    @property
    def stdout(self) -> int:
        """The descriptor of its stdout, which does not block."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def write(self, data: bytes) -> None:
        """Write a few bytes to its stdin.

        Raises:
            OSError: it has ended, or does not read.
        """
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), data)

    async def read(self) -> bytes:
        """Bytes from its stdout; empty once all writers have closed it, or once it has ended and
        nothing is left to read: what it has started may hold the pipe for ever."""
        return await self._read(self.stdout)

    async def read_errors(self) -> bytes:
        """The same for stderr."""
        assert self._process.stderr is not None
        return await self._read(self._process.stderr.fileno())

    async def status(self) -> int:
        """Its exit status once it has ended; negative: the signal that ended it."""
        while (status := self._status()) is None:
            await _happened(self.pid)
        return status

    def abandon(self) -> None:
        """Kill its group and close all pipes without a wait for its end, which :meth:`status`
        reports."""
        self._kill()
        self._close()

    async def _read(self, fd: int) -> bytes:
        while True:
            await _happened(self.pid, fd)
            ended = not self.runs  # if so, all that it wrote is in the pipe
            with suppress(BlockingIOError):
                return os.read(fd, CHUNK)
            if ended:
                return b""

    def _status(self) -> int | None:
        """Its exit status, or ``None`` while it runs."""
        if self._released:
            return self._process.poll()
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # reaped by others: the status is lost
            return self._process.poll()
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def _kill(self) -> None:
        self._status()
        if self._process.returncode is None:  # not reaped, so the group is its own
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._released = True

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    async def end(self, within_s: float, *, kill: bool = True) -> bool:
        """Close all pipes, kill its group unless ``kill`` is false, and wait; returns whether it
        ended.

        A child that has not, for instance because a driver holds it, is left behind.
        """
        if kill:
            self._kill()
        self._released = True
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


async def _happened(pid: int, *pipes: int) -> None:
    """Return once the process has perhaps ended, or there is something to read in ``pipes``."""
    try:
        end = os.pidfd_open(pid)
    except OSError:
        await readable(pipes, LOOK_S)
        return
    try:
        await readable((end, *pipes))
    finally:
        os.close(end)


async def readable(fds: Iterable[int], within_s: float | None = None) -> None:
    """Wait until one of ``fds`` is readable, or ``within_s`` seconds have passed."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    fds = tuple(fds)
    try:
        for fd in fds:
            loop.add_reader(fd, ready.set)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await ready.wait()
    finally:
        for fd in fds:
            loop.remove_reader(fd)
