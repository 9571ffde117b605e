"""The kernel log as a file descriptor: thin IO, never blocks.

One read is one record. The first read after opening gives the oldest record that is kept; EPIPE
means that records were overwritten before they were read, EINVAL that one was larger than any
(Linux, Documentation/ABI/testing/dev-kmsg).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

PLACE = Path("/dev/kmsg")
BOOT = Path("/proc/sys/kernel/random/boot_id")
LARGEST = 16_384
BATCH = 256
"""Records between two turns of the event loop."""

Read = Callable[[int, int], bytes]


class Closed(Exception):
    """The other end of the log has gone."""


def open_log(place: Path = PLACE) -> int:
    """A descriptor that does not block.

    Raises:
        OSError: there is no kernel log, or reading it is not permitted.
    """
    return os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def boot_id() -> str:
    """Changes with every boot; empty if the host does not tell."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


class KernelLog:
    """Reads records from ``fd``, which it owns and :meth:`close` closes."""

    def __init__(self, fd: int, read: Read = os.read) -> None:
        self._fd = fd
        self._read = read
        self.overwritten = 0
        """How many times a read found that records were lost."""

    def batch(self) -> list[bytes]:
        """What is there now, at most :data:`BATCH` records.

        Raises:
            Closed: no record will come any more.
        """
        found: list[bytes] = []
        for _ in range(BATCH):
            try:
                raw = self._read(self._fd, LARGEST)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.EINVAL):
                    raise
                self.overwritten += 1
                continue
            if not raw:
                if found:
                    break
                raise Closed("the kernel log was closed")
            found.append(raw)
        return found

    @property
    def fd(self) -> int:
        """Readable when there is a record."""
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


class Sequence:
    """Which records are new, and how many were never seen."""

    def __init__(self, last: int | None) -> None:
        self.last = last
        self.lost = 0
        """Since the start."""

    def new(self, seq: int) -> bool:
        """Whether record ``seq`` has not been taken before."""
        if self.last is not None:
            if seq <= self.last:
                return False
            self.lost += seq - self.last - 1
        self.last = seq
        return True
