"""The daemon's side of the worker process: ask, wait until the deadline, abandon."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import msgspec

from tmd.plugin import Child, bare_python, in_words

from .report import NvmlReport

ABANDONED = 3
"""Most workers that do not die: each keeps memory, and asking a wedged driver again does not
help."""
FAREWELL_S = 1.0
"""Longest wait for killed workers when the daemon stops."""
WORKER = Path(__file__).with_name("worker.py")
BINDINGS = "pynvml"


class Hung(Exception):
    """No answer within the deadline."""


class Ended(Exception):
    """The worker process is gone."""


class NvmlProbe:
    """Owns at most one active worker, which :meth:`close` ends. It never waits for a worker to die:
    a process inside a wedged driver cannot be killed."""

    def __init__(self, sysfs: str) -> None:
        self._sysfs = sysfs
        self._worker: Child | None = None
        self._abandoned: list[Child] = []

    async def ask(self, deadline_s: float) -> NvmlReport:
        """One reading of the GPUs.

        Raises:
            Hung: no answer in ``deadline_s`` seconds, or too many workers hang already.
            Ended: the worker ended or sent an invalid report.
        """
        try:
            worker = self._running()
        except OSError as error:
            raise Ended(f"the NVML worker does not start: {in_words(error)}") from None
        try:
            async with asyncio.timeout(deadline_s):
                line = await _exchange(worker)
            return msgspec.json.decode(line, type=NvmlReport)
        except TimeoutError:
            self._abandon()
            raise Hung(f"the driver did not answer within {deadline_s:g} s") from None
        except (OSError, EOFError, msgspec.DecodeError) as error:
            self._abandon()
            raise Ended(f"the NVML worker ended: {in_words(error)}") from None

    @property
    def pid(self) -> int | None:
        """Pid of the active worker."""
        return self._worker.pid if self._worker is not None else None

    async def close(self) -> None:
        """End the worker. One that is stuck in a wedged driver is left behind."""
        if self._worker is not None:
            self._abandon()
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(FAREWELL_S):
                for worker in self._abandoned:
                    await worker.status()

    def _running(self) -> Child:
        self._abandoned = [worker for worker in self._abandoned if worker.runs]
        if self._worker is None:
            if len(self._abandoned) >= ABANDONED:
                raise Hung(f"{len(self._abandoned)} workers hang in the driver")
            command = bare_python(WORKER, self._sysfs, needs=(BINDINGS,))
            self._worker = Child.start(command, stdin=True)
        return self._worker

    def _abandon(self) -> None:
        worker, self._worker = self._worker, None
        assert worker is not None
        worker.abandon()
        self._abandoned.append(worker)


async def _exchange(worker: Child) -> bytes:
    """Ask, and read the line of the answer."""
    worker.write(b"\n")  # the pipe is empty: the last request was answered
    found = b""
    while not found.endswith(b"\n"):
        chunk = await worker.read()
        if not chunk:
            raise EOFError("it closed its output")
        found += chunk
    return found
