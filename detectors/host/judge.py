"""Turns readings of the host into signals. Pure; times are passed in; each finding once."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from tmd.plugin import Severity, Signal, State

from .facts import Clock, HostReading, Process, Space

HOST = "host"
DISK_FULL, DISK_READ_ONLY, DISK_HANGS = "host.disk_full", "host.disk_read_only", "host.disk_hangs"
MEMORY_PRESSURE, OOM_KILL = "host.memory_pressure", "host.oom_kill"
HUNG_TASK, DRIVER_STUCK = "host.hung_task", "host.driver_stuck"
CLOCK_UNSYNCHRONISED, CLOCK_SKEW = "host.clock_unsynchronised", "host.clock_skew"
SLACK = 1.2
"""A value must be better than its limit by this factor before its finding clears."""


class HostLimits(Struct, frozen=True):
    disk_free_percent: float = 3.0
    pressure_percent: float = 20.0
    clock_offset_s: float = 0.1
    clock_hold_s: float = 1800.0
    quiet_s: float = 600.0
    stuck_checks: int = 5


class HostFindings:
    """Turns readings into signals."""

    def __init__(self, limits: HostLimits) -> None:
        self._limits = limits
        self._raised: set[tuple[str, str]] = set()
        self._was_writable: set[str] = set()
        self._counts: dict[str, int] = {}
        self._grew_at: dict[str, float] = {}
        self._sleeping: dict[tuple[int, int], tuple[Process, int]] = {}
        self._unsynchronised_since: float | None = None

    def observe(self, answer: HostReading, now: float) -> Iterator[Signal]:
        """Signals for what has changed."""
        facts = answer.facts
        for path, read_only in facts.read_only.items():
            yield from self._mount(path, read_only)
        for path in answer.answered:
            yield from self._set(DISK_HANGS, _disk(path), Severity.WARNING, False, "")
        for space in answer.spaces:
            yield from self._space(space)
        if answer.hangs is not None:
            text = f"the file system of {answer.hangs} does not answer"
            yield from self._set(DISK_HANGS, _disk(answer.hangs), Severity.WARNING, True, text)
        yield from self._pressure(facts.pressure_percent)
        yield from self._growth(OOM_KILL, facts.oom_kills, "out-of-memory kills", now)
        yield from self._growth(HUNG_TASK, facts.hung_tasks, "hung tasks", now)
        yield from self._stuck(facts.sleeping)
        if answer.clock is not None:
            yield from self._clock(answer.clock, now)

    def _mount(self, path: str, read_only: bool) -> Iterator[Signal]:
        """Read-only is a fault only if it was not so before: the kernel stopped writing."""
        if not read_only:
            self._was_writable.add(path)
        broken = read_only and path in self._was_writable
        text = f"the file system of {path} has become read-only"
        yield from self._set(DISK_READ_ONLY, _disk(path), Severity.DEGRADED, broken, text)

    def _space(self, space: Space) -> Iterator[Signal]:
        free, what = min((space.blocks, "space"), (space.files, "inodes"))
        holds = self._below(DISK_FULL, _disk(space.path), free, self._limits.disk_free_percent)
        text = f"{free:.1f} % of the {what} of {space.path} is free"
        yield from self._set(DISK_FULL, _disk(space.path), Severity.WARNING, holds, text)

    def _pressure(self, percent: float | None) -> Iterator[Signal]:
        if percent is None:
            return
        limit = self._limits.pressure_percent
        raised = (MEMORY_PRESSURE, HOST) in self._raised
        holds = percent > (limit / SLACK if raised else limit)
        text = f"all tasks waited for memory during {percent:.0f} % of the last minute"
        yield from self._set(MEMORY_PRESSURE, HOST, Severity.WARNING, holds, text)

    def _growth(self, code: str, count: int | None, what: str, now: float) -> Iterator[Signal]:
        """A count since boot that grew; clears after a quiet time."""
        if count is None:
            return
        before = self._counts.get(code, count)
        self._counts[code] = count
        if count > before:
            self._grew_at[code] = now
        grew_at = self._grew_at.get(code)
        holds = grew_at is not None and now - grew_at < self._limits.quiet_s
        text = f"new {what}: {max(0, count - before)}, since boot: {count}"
        yield from self._set(code, HOST, Severity.WARNING, holds, text)

    def _stuck(self, sleeping: tuple[Process, ...]) -> Iterator[Signal]:
        """The same process asleep at several readings, without having run in between."""
        seen = {}
        for process in sleeping:
            key = (process.pid, process.started)
            before, looks = self._sleeping.get(key, (process, 0))
            seen[key] = (process, looks + 1 if before.ticks == process.ticks else 1)
        self._sleeping = seen
        stuck = [p for p, looks in seen.values() if looks >= self._limits.stuck_checks]
        names = ", ".join(sorted(f"{p.name} ({p.pid})" for p in stuck))
        checks = self._limits.stuck_checks
        text = f"blocked inside the GPU driver in {checks} readings in a row: {names}"
        yield from self._set(DRIVER_STUCK, HOST, Severity.DEGRADED, bool(stuck), text)

    def _clock(self, clock: Clock, now: float) -> Iterator[Signal]:
        if clock.synchronised:
            self._unsynchronised_since = None
        elif self._unsynchronised_since is None:
            self._unsynchronised_since = now
        since = self._unsynchronised_since
        holds = since is not None and now - since >= self._limits.clock_hold_s
        minutes = self._limits.clock_hold_s / 60
        text = f"the clock has not been synchronised for {minutes:.0f} min; check the time service"
        yield from self._set(CLOCK_UNSYNCHRONISED, HOST, Severity.WARNING, holds, text)
        off = abs(clock.offset_s)
        limit = self._limits.clock_offset_s
        raised = (CLOCK_SKEW, HOST) in self._raised
        holds = clock.synchronised and off > (limit / SLACK if raised else limit)
        text = f"the clock is off by {clock.offset_s:.3f} s"
        yield from self._set(CLOCK_SKEW, HOST, Severity.WARNING, holds, text)

    def _below(self, code: str, entity: str, value: float, limit: float) -> bool:
        return value < (limit * SLACK if (code, entity) in self._raised else limit)

    def _set(
        self, code: str, entity: str, severity: Severity, holds: bool, message: str
    ) -> Iterator[Signal]:
        if holds == ((code, entity) in self._raised):
            return
        self._raised ^= {(code, entity)}
        state = State.RAISED if holds else State.CLEARED
        yield Signal(code, entity, severity, state, message if holds else "")


def _disk(path: str) -> str:
    return f"disk:{path}"
