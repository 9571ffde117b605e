"""The host itself: disks, memory, clock, and processes stuck in the GPU driver."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import ClassVar

from tmd.plugin import (
    Count,
    Detector,
    DetectorConfig,
    DetectorContext,
    NotNegative,
    Positive,
    Signal,
)

from ..trouble import Trouble
from .facts import Question
from .judge import HostFindings, HostLimits
from .probe import ask

UNREADABLE = "host.unreadable"
NO_READING = "the process that reads this host's state does not start, or does not answer in time"
MISSES = 3
"""Consecutive failed readings before that is reported."""
ANSWER_S = 20.0
"""Longest reading, including the start of its process."""
AVOID_S = (600.0, 4 * 3600.0)
"""Pause after a file system did not answer, doubled each time from the first to the second: each
attempt may leave a process behind that cannot be killed."""
_LIMITS = HostLimits()


class HostDetectorConfig(DetectorConfig, frozen=True, forbid_unknown_fields=True):
    poll_s: Positive = 60.0
    """Time between two readings."""
    disks: tuple[str, ...] = ("/", "/tmp", "/var", "/dev/shm")
    """Paths whose file systems are checked; they must not be symbolic links. Network file systems
    are allowed: they are read by a process that may hang without harm."""
    disk_free_percent: NotNegative = _LIMITS.disk_free_percent
    """Less free space, or fewer free inodes, is a finding."""
    pressure_percent: NotNegative = _LIMITS.pressure_percent
    """Share of a minute in which all tasks that are not idle wait for memory (PSI, full avg60)."""
    driver_processes: tuple[str, ...] = ("nvidia*",)
    """Shell patterns for the names of the GPU driver's processes."""
    stuck_checks: Count = _LIMITS.stuck_checks
    """Such a process is stuck if it is in state D, and has not run, for this many readings."""
    clock_offset_s: NotNegative = _LIMITS.clock_offset_s
    """A larger offset that the kernel has yet to correct is a finding. Under chrony the kernel's
    offset is always 0."""
    clock_hold_s: NotNegative = _LIMITS.clock_hold_s
    """An unsynchronised clock is a finding after this long."""
    quiet_s: Positive = _LIMITS.quiet_s
    """Out-of-memory kills and hung tasks clear after this long without another."""
    proc_root: str = "/proc"
    """Where procfs is mounted."""

    def limits(self) -> HostLimits:
        """The settings that the judge needs."""
        return HostLimits(
            disk_free_percent=self.disk_free_percent,
            pressure_percent=self.pressure_percent,
            clock_offset_s=self.clock_offset_s,
            clock_hold_s=self.clock_hold_s,
            quiet_s=self.quiet_s,
            stuck_checks=self.stuck_checks,
        )


class HostDetector(Detector):
    name: ClassVar[str] = "host"
    Config: ClassVar[type[DetectorConfig]] = HostDetectorConfig
    says_looked: ClassVar[bool] = True

    def supported(self) -> str | None:
        return None if sys.platform == "linux" else "it reads /proc, which only Linux has"

    async def watch(self, ctx: DetectorContext) -> AsyncIterator[Signal]:
        config = ctx.config
        assert isinstance(config, HostDetectorConfig)
        findings, avoided, misses = HostFindings(config.limits()), Avoided(), 0
        unreadable = Trouble(UNREADABLE)
        while True:
            paths = tuple(p for p in config.disks if not avoided.holds(p, ctx.now()))
            question = Question(paths, config.driver_processes, config.proc_root)
            answer = await ask(question, ANSWER_S)
            misses = misses + 1 if answer is None else 0
            for signal in unreadable.report(NO_READING if misses >= MISSES else ""):
                yield signal
            if answer is not None:
                if answer.hangs is not None:
                    avoided.add(answer.hangs, ctx.now())
                for signal in findings.observe(answer, ctx.now()):
                    yield signal
                ctx.looked()
            await ctx.sleep(config.poll_s)


class Avoided:
    """File systems that did not answer, each skipped for a growing time."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, float]] = {}

    def add(self, path: str, now: float) -> None:
        pause = self._until.get(path, (0.0, AVOID_S[0] / 2))[1] * 2
        self._until[path] = (now + pause, min(pause, AVOID_S[1] / 2))

    def holds(self, path: str, now: float) -> bool:
        return path in self._until and now < self._until[path][0]
