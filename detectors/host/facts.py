"""What one look at a host has found. Values only.

Named tuples: the process that looks has the standard library alone.
"""

from __future__ import annotations

from typing import NamedTuple


class Process(NamedTuple):
    """A process in uninterruptible sleep."""

    pid: int
    started: int
    """Clock ticks after boot: with the pid it names the process for ever."""
    name: str
    ticks: int
    """Processor time it has used."""


class Clock(NamedTuple):
    """What the kernel knows of the clock's error (adjtimex(2))."""

    synchronised: bool
    offset_s: float


class HostFacts(NamedTuple):
    """``None`` is what this kernel does not tell."""

    read_only: dict[str, bool] = {}
    """Configured path -> whether its file system is read-only."""
    pressure_percent: float | None = None
    """Part of the last minute in which all tasks that could run waited for memory."""
    oom_kills: int | None = None
    """Since boot."""
    hung_tasks: int | None = None
    """Tasks that stood still for hung_task_timeout_secs, since boot (Linux 6.13 and newer)."""
    sleeping: tuple[Process, ...] = ()
    """Those of the driver."""


class Space(NamedTuple):
    """What is free on the file system of a path, in percent."""

    path: str
    blocks: float
    files: float


class HostReading(NamedTuple):
    """All of it."""

    facts: HostFacts
    spaces: tuple[Space, ...] = ()
    hangs: str | None = None
    """The path whose file system did not answer; nothing is known of those after it."""
    clock: Clock | None = None


class Question(NamedTuple):
    paths: tuple[str, ...]
    drivers: tuple[str, ...]
    """Shell patterns of process names."""
    proc_root: str = "/proc"
