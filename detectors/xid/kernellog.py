"""The kernel log as a file descriptor: thin IO that never blocks.

One read is one record. The first read after opening returns the oldest record. EPIPE means that
records were overwritten before they were read, EINVAL that a record exceeded the buffer (Linux,
Documentation/ABI/testing/dev-kmsg).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

PLACE = Path("/dev/kmsg")
LARGEST = 16_384
BATCH = 256
"""Records per turn of the event loop."""
SKEW_S = 1.0
"""Tolerance for the clocks of different processors, which differ by far less."""
REOPEN_S = 1.0
"""Pause between attempts to reopen a broken log. It does not grow: an unread fault may wait."""

Read = Callable[[int, int], bytes]


class Closed(Exception):
    """The other end of the log is closed."""


def open_log(place: Path = PLACE) -> int:
    """A non-blocking descriptor.

    Raises:
        OSError: there is no kernel log, or reading it is not permitted.
    """
    return os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


class KernelLog:
    """Reads records from ``fd``, which it owns; closed by :meth:`close`."""

    def __init__(self, fd: int, read: Read = os.read) -> None:
        self._fd = fd
        self._read = read
        self.overwritten = 0
        """How many reads found that records were lost."""

    def batch(self) -> list[bytes]:
        """The records available now, at most :data:`BATCH`.

        Raises:
            Closed: no more records will come.
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


class KernelLogSource:
    """The log at ``place``, which is reopened when it breaks.

    A reopened log starts with the oldest record it still has: records written in the meantime are
    found, and :class:`Sequence` skips those that were read before.
    """

    def __init__(self, place: Path, open_log: Callable[[Path], int]) -> None:
        self._place = place
        self._open = open_log
        self._log: KernelLog | None = None
        self._next = float("-inf")
        self._gone = 0
        self.problem = ""
        """Why nothing is read now."""

    def batch(self, now: float) -> list[bytes]:
        """The records available now, at most :data:`BATCH`; none while there is no log."""
        if self.problem and now < self._next:
            return []
        try:
            if self._log is None or self.problem:
                self._open_again()
            assert self._log is not None
            found = self._log.batch()
        except (OSError, Closed) as error:
            self._next = now + REOPEN_S
            self.problem = f"{self._place}: {_reason(error)}"
            return []
        self.problem = ""
        return found

    def _open_again(self) -> None:
        # It is opened before the old one is closed: a pipe must always have a reader.
        log = KernelLog(self._open(self._place))
        self.close()
        self._log = log

    @property
    def overwritten(self) -> int:
        """How many reads found that records were lost."""
        return self._gone + (self._log.overwritten if self._log is not None else 0)

    @property
    def fd(self) -> int | None:
        """The descriptor to poll for records. ``None`` while the log is broken, since a broken one
        always polls readable."""
        return self._log.fd if self._log is not None and not self.problem else None

    def close(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            self._gone += log.overwritten
            log.close()


def _reason(error: OSError | Closed) -> str:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return reason or type(error).__name__


class Sequence:
    """Tracks which records are new, and how many were never seen."""

    def __init__(self, last: int | None, at: float | None = None) -> None:
        self.last = last
        self.at = at
        """Time of the latest record, seconds since boot."""
        self.lost = 0
        """Lost records since the start."""

    def new(self, seq: int, at: float) -> bool:
        """Whether record ``seq`` with time ``at`` is new.

        Numbers and times only grow. A smaller number at a later time means another log with its own
        numbers: the process that copies records into a pipe may have been restarted.
        """
        anew = self.last is None or (
            seq <= self.last and self.at is not None and at > self.at + SKEW_S
        )
        if not anew and self.last is not None:
            if seq <= self.last:
                return False
            self.lost += seq - self.last - 1
        self.last, self.at = seq, at
        return True
