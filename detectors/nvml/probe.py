"""The worker process as seen from the daemon: ask, wait no longer than the deadline, abandon."""

from __future__ import annotations

import asyncio
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import msgspec

from tmd.plugin import bare_python, in_words

from .report import Report

ABANDONED = 3
"""Workers that do not die, at most: each keeps memory, and asking a wedged driver again helps
nobody."""
FAREWELL_S = 1.0
"""Longest wait for killed workers when the daemon stops."""
WORKER = Path(__file__).with_name("worker.py")
BINDINGS = "pynvml"
_CHUNK = 65_536


class Hung(Exception):
    """No answer within the deadline."""


class Ended(Exception):
    """The worker process is gone."""


class Probe:
    """At most one worker at work, which :meth:`close` ends. Never waits for one: a process inside a
    wedged driver cannot be killed."""

    def __init__(self, sysfs: str) -> None:
        self._sysfs = sysfs
        self._worker: subprocess.Popen[bytes] | None = None
        self._abandoned: list[subprocess.Popen[bytes]] = []

    async def ask(self, deadline_s: float) -> Report:
        """One look at the GPUs.

        Raises:
            Hung: no answer in ``deadline_s`` seconds, or too many workers hang already.
            Ended: the worker ended, or said what is no report.
        """
        worker = self._running()
        try:
            async with asyncio.timeout(deadline_s):
                line = await _exchange(worker)
            return msgspec.json.decode(line, type=Report)
        except TimeoutError:
            self._abandon()
            raise Hung(f"the driver did not answer within {deadline_s:g} s") from None
        except (OSError, EOFError, msgspec.DecodeError) as error:
            self._abandon()
            raise Ended(f"the NVML worker ended: {in_words(error)}") from None

    @property
    def pid(self) -> int | None:
        """Of the worker that is asked now."""
        return self._worker.pid if self._worker is not None else None

    async def close(self) -> None:
        """End the worker. One that a wedged driver holds is left behind."""
        if self._worker is not None:
            self._abandon()
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(FAREWELL_S):
                for worker in self._abandoned:
                    await _end_of(worker)

    def _running(self) -> subprocess.Popen[bytes]:
        self._abandoned = [w for w in self._abandoned if w.poll() is None]
        if self._worker is None:
            if len(self._abandoned) >= ABANDONED:
                raise Hung(f"{len(self._abandoned)} workers hang in the driver")
            self._worker = _start(self._sysfs)
        return self._worker

    def _abandon(self) -> None:
        worker, self._worker = self._worker, None
        assert worker is not None
        worker.kill()
        for pipe in (worker.stdin, worker.stdout):
            assert pipe is not None
            pipe.close()
        self._abandoned.append(worker)


def _start(sysfs: str) -> subprocess.Popen[bytes]:
    """A worker in a session of its own, so that a terminal's signals do not reach it."""
    worker = subprocess.Popen(
        bare_python(WORKER, sysfs, needs=(BINDINGS,)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    )
    assert worker.stdout is not None
    os.set_blocking(worker.stdout.fileno(), False)
    return worker


async def _exchange(worker: subprocess.Popen[bytes]) -> bytes:
    """Ask, and read the line of the answer."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    os.write(worker.stdin.fileno(), b"\n")  # the pipe is empty: it has answered before
    found = b""
    while not found.endswith(b"\n"):
        chunk = await _read(worker.stdout.fileno())
        if not chunk:
            raise EOFError("it closed its output")
        found += chunk
    return found


async def _read(fd: int) -> bytes:
    await _readable(fd)
    return os.read(fd, _CHUNK)


async def _end_of(worker: subprocess.Popen[bytes]) -> None:
    fd = os.pidfd_open(worker.pid)
    try:
        await _readable(fd)
        worker.poll()
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
