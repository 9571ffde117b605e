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
    """Whether the clock is synchronised, and the offset that the kernel has yet to correct
    (adjtimex(2))."""

    synchronised: bool
    offset_s: float


class HostFacts(NamedTuple):
    """``None``: this kernel does not provide the fact."""

    read_only: dict[str, bool] = {}
    """Configured path -> whether its file system is read-only."""
    pressure_percent: float | None = None
    """Share of the last minute in which all tasks that were not idle waited for memory."""
    oom_kills: int | None = None
    """Since boot."""
    hung_tasks: int | None = None
    """Tasks blocked for hung_task_timeout_secs, since boot (Linux 6.13 and newer)."""
    sleeping: tuple[Process, ...] = ()
    """Processes of the GPU's driver in uninterruptible sleep."""


class Space(NamedTuple):
    """Free space and inodes on the file system of a path, in percent."""

    path: str
    blocks: float
    files: float


class HostReading(NamedTuple):
    """What one reading returned before its deadline."""

    facts: HostFacts
    spaces: tuple[Space, ...] = ()
    hangs: str | None = None
    """The path whose file system did not answer; paths after it were not read."""
    clock: Clock | None = None
    answered: tuple[str, ...] = ()
    """The paths whose file systems answered, also with an error."""


class Question(NamedTuple):
    """What is to be read."""

    paths: tuple[str, ...]
    driver_processes: tuple[str, ...]
    """Shell patterns: names of the processes of the GPU's driver."""
    proc_root: str = "/proc"
