"""The host itself: disks, memory, clock, and processes that the driver does not let go."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import ClassVar

from tmd.plugin import Detector, DetectorConfig, DetectorContext, Severity, Signal, State

from .facts import Question
from .judge import HOST, HostFindings, HostLimits
from .probe import ask

UNREADABLE = "host.unreadable"
MISSES = 3
"""Looks without any answer before that is said."""
ANSWER_S = 20.0
"""Longest look, the start of the process that looks included."""
AVOID_S = (600.0, 4 * 3600.0)
"""A file system that did not answer is left alone for so long, doubled each time up to the second:
every try may leave a process behind that cannot end."""
_LIMITS = HostLimits()


class HostDetectorConfig(DetectorConfig, frozen=True, forbid_unknown_fields=True):
    poll_s: float = 60.0
    """Time between two readings."""
    disks: tuple[str, ...] = ("/", "/tmp", "/var", "/dev/shm")
    """Paths whose file systems are looked at. One on the network is asked by a process that may
    hang without harm."""
    disk_free_percent: float = _LIMITS.disk_free_percent
    """Less space, or fewer inodes, is a finding."""
    pressure_percent: float = _LIMITS.pressure_percent
    """Part of a minute in which everything waits for memory (PSI, full avg60)."""
    driver_processes: tuple[str, ...] = ("nvidia*",)
    """Names of processes of the GPU driver."""
    stuck_checks: int = _LIMITS.stuck_checks
    """Looks at which such a process must be in state D and not have run."""
    clock_offset_s: float = _LIMITS.clock_offset_s
    """A larger offset of the clock is a finding."""
    clock_hold_s: float = _LIMITS.clock_hold_s
    """A clock that nothing sets is a finding after so long."""
    quiet_s: float = _LIMITS.quiet_s
    """Out-of-memory kills and hung tasks are over after so long without another."""
    proc_root: str = "/proc"
    """Where procfs is mounted."""

    def limits(self) -> HostLimits:
        """What the judge needs of it."""
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

    def supported(self) -> str | None:
        return None if sys.platform == "linux" else "it reads /proc, which only Linux has"

    async def watch(self, ctx: DetectorContext) -> AsyncIterator[Signal]:
        config = ctx.config
        assert isinstance(config, HostDetectorConfig)
        findings, avoided, misses = HostFindings(config.limits()), Avoided(), 0
        while True:
            paths = tuple(p for p in config.disks if not avoided.holds(p, ctx.now()))
            question = Question(paths, config.driver_processes, config.proc_root)
            answer = await ask(question, ANSWER_S)
            if answer is None:
                misses += 1
                if misses == MISSES:
                    yield _unreadable(State.RAISED)
            else:
                if misses >= MISSES:
                    yield _unreadable(State.CLEARED)
                misses = 0
                if answer.hangs is not None:
                    avoided.add(answer.hangs, ctx.now())
                for signal in findings.observe(answer, ctx.now()):
                    yield signal
            await ctx.sleep(config.poll_s)


class Avoided:
    """File systems that did not answer, each left alone for longer and longer."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, float]] = {}

    def add(self, path: str, now: float) -> None:
        pause = self._until.get(path, (0.0, AVOID_S[0] / 2))[1] * 2
        self._until[path] = (now + pause, min(pause, AVOID_S[1] / 2))

    def holds(self, path: str, now: float) -> bool:
        return path in self._until and now < self._until[path][0]


def _unreadable(state: State) -> Signal:
    return Signal(
        code=UNREADABLE,
        entity=HOST,
        severity=Severity.WARNING,
        state=state,
        message="the process that looks at this host does not answer",
    )
