"""The facts that one reading of a host returns. Values only.

Named tuples: the reading process uses the standard library alone.
"""

from __future__ import annotations

from typing import NamedTuple


class Process(NamedTuple):
    """A process in uninterruptible sleep."""

    pid: int
    started: int
    """Clock ticks after boot: together with the pid they identify the process."""
    name: str
    ticks: int
    """Processor time used."""


class Clock(NamedTuple):
    """The kernel's estimate of the clock's error (adjtimex(2))."""

    synchronised: bool
    offset_s: float


class HostFacts(NamedTuple):
    """``None``: this kernel does not provide the fact."""

    read_only: dict[str, bool] = {}
    """Configured path -> whether its file system is read-only."""
    pressure_percent: float | None = None
    """Share of the last minute in which all runnable tasks waited for memory."""
    oom_kills: int | None = None
    """Since boot."""
    hung_tasks: int | None = None
    """Tasks blocked for hung_task_timeout_secs, since boot (Linux 6.13 and newer)."""
    sleeping: tuple[Process, ...] = ()
    """The driver's processes in uninterruptible sleep."""


class Space(NamedTuple):
    """Free space and inodes on the file system of a path, in percent."""

    path: str
    blocks: float
    files: float


class HostReading(NamedTuple):
    """The complete result."""

    facts: HostFacts
    spaces: tuple[Space, ...] = ()
    hangs: str | None = None
    """The path whose file system did not answer; paths after it were not read."""
    clock: Clock | None = None


class Question(NamedTuple):
    paths: tuple[str, ...]
    drivers: tuple[str, ...]
    """Shell patterns of process names."""
    proc_root: str = "/proc"
