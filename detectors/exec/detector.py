"""Runs the operator's commands as checks: exit status 0 healthy, 1 degraded, 2 failed.

A check prints JSON: ``{"message": "...", "evidence": ["..."]}``. A healthy one may print nothing.
Any other status or output, a degraded or failed check without such JSON (a crashed script also
exits with 1), too much output or a timeout is a finding about the check, never about the host.
"""

from __future__ import annotations

import asyncio
import os
import string
from collections.abc import AsyncIterator, Callable, Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, Struct

from tmd.plugin import (
    Child,
    Count,
    Detector,
    DetectorConfig,
    DetectorContext,
    Positive,
    Severity,
    Signal,
    State,
    bare_python,
    in_words,
)

UNUSABLE_CODE = "exec.unusable"
END_S = 4.0
"""Longest wait for the end of a check: longer than killed processes take, shorter than a reload of
the daemon waits."""
WARDEN = Path(__file__).with_name("warden.py")
NAMED = frozenset(string.ascii_letters + string.digits + "_-")


class ExecCheck(Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of ``[[detectors.exec.checks]]``."""

    name: str
    command: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Program and arguments, run without a shell."""
    every_s: Positive = 60.0
    """From the end of one run to the start of the next."""
    timeout_s: Positive = 30.0
    """After this time it is killed, with every process that it started, in any session."""

    def __post_init__(self) -> None:
        bad = next((c for c in self.name if c not in NAMED), "")
        if bad or not self.name:
            what = f"has {bad!a} in its name" if bad else "has no name"
            raise ValueError(f"a check {what}; allowed are ASCII letters, digits, '_' and '-'")


class ExecConfig(DetectorConfig, frozen=True, forbid_unknown_fields=True):
    checks: tuple[ExecCheck, ...] = ()
    """Tables ``[[detectors.exec.checks]]``: ``name``, ``command``, ``every_s``, ``timeout_s``."""
    output_limit: Count = 65536
    """Largest output of a check, in bytes."""

    def __post_init__(self) -> None:
        names = [check.name for check in self.checks]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two checks are named {', '.join(twice)}")


class CheckHealth(StrEnum):
    HEALTHY = "healthy"
    DEGRADED = "degraded"
    FAILED = "failed"
    UNKNOWN = "unknown"  # the check itself failed


class CheckOutcome(Struct, frozen=True):
    """The result of one run of a check."""

    health: CheckHealth
    message: str = ""
    evidence: tuple[str, ...] = ()


class ExecDetector(Detector):
    name: ClassVar[str] = "exec"
    Config: ClassVar[type[DetectorConfig]] = ExecConfig
    says_looked: ClassVar[bool] = True

    async def watch(self, ctx: DetectorContext) -> AsyncIterator[Signal]:
        config = ctx.config
        assert isinstance(config, ExecConfig)
        news: asyncio.Queue[Signal | BaseException] = asyncio.Queue()

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                news.put_nowait(error)

        tasks, pending = [], {check.name for check in config.checks}
        if not pending:
            ctx.looked()

        def through(name: str) -> None:
            pending.discard(name)
            if not pending:
                ctx.looked()

        for check in config.checks:
            own = partial(through, check.name)
            task = asyncio.create_task(_repeat(check, config.output_limit, ctx, news, own))
            task.add_done_callback(ended)
            tasks.append(task)
        try:
            while True:
                item = await news.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _repeat(
    check: ExecCheck,
    output_limit: int,
    ctx: DetectorContext,
    news: asyncio.Queue[Signal | BaseException],
    through: Callable[[], None],
) -> None:
    findings, runner = ExecFindings(check), CheckRunner(check, output_limit)
    while True:
        outcome = await runner.run()
        for found in findings.observe(outcome):
            news.put_nowait(found)
        through()
        await ctx.sleep(check.every_s)


# --- judging --------------------------------------------------------------------------------------


class _CheckOutput(Struct, frozen=True):
    message: str
    evidence: tuple[str, ...] = ()


_BY_STATUS = {0: CheckHealth.HEALTHY, 1: CheckHealth.DEGRADED, 2: CheckHealth.FAILED}
_SEVERITY = {CheckHealth.DEGRADED: Severity.DEGRADED, CheckHealth.FAILED: Severity.FATAL}


def judge(status: int, output: bytes) -> CheckOutcome:
    """The meaning of an exit status (negative: a signal) and stdout."""
    health = _BY_STATUS.get(status)
    if health is None:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return CheckOutcome(CheckHealth.UNKNOWN, f"{how}; expected 0, 1 or 2")
    if health is CheckHealth.HEALTHY and not output.strip():
        return CheckOutcome(health)
    try:
        parsed = msgspec.json.decode(output, type=_CheckOutput)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return CheckOutcome(
            CheckHealth.UNKNOWN,
            f"ended with status {status} and no JSON message: {in_words(error)}",
        )
    return CheckOutcome(health, parsed.message, parsed.evidence)


class ExecFindings:
    """Turns the outcomes of one check into signals; reports each finding once."""

    def __init__(self, check: ExecCheck) -> None:
        self._check = check
        self._health = CheckHealth.HEALTHY
        self._unusable = ""
        """Why the check last failed to run; empty if it ran."""

    def observe(self, outcome: CheckOutcome) -> Iterator[Signal]:
        """A check that failed to run leaves the host's findings unchanged. A finding keeps its
        gravest severity until the check passes: if it came back milder each time, that would count
        as a recurrence, which may ban the host."""
        unusable = outcome.health is CheckHealth.UNKNOWN
        why = f"check {self._check.name}: {outcome.message}" if unusable else ""
        if why != self._unusable:
            self._unusable = why
            entity = f"check:{self._check.name}"
            yield Signal(UNUSABLE_CODE, entity, Severity.WARNING, _state(unusable), why)
        if unusable:
            return
        before = self._health
        if outcome.health is CheckHealth.HEALTHY:
            self._health = outcome.health
            if before is not CheckHealth.HEALTHY:
                yield self._finding(before, State.CLEARED, CheckOutcome(before))
        elif _grade(outcome.health) > _grade(before):
            self._health = outcome.health
            yield self._finding(outcome.health, State.RAISED, outcome)

    def _finding(self, health: CheckHealth, state: State, outcome: CheckOutcome) -> Signal:
        return Signal(
            code=f"exec.{self._check.name}",
            entity="host",
            severity=_SEVERITY[health],
            state=state,
            message=outcome.message,
            evidence=outcome.evidence,
        )


def _grade(health: CheckHealth) -> int:
    return _SEVERITY[health].grade if health in _SEVERITY else 0


def _state(holds: bool) -> State:
    return State.RAISED if holds else State.CLEARED


# --- running --------------------------------------------------------------------------------------


class CheckRunner:
    """Runs one check again and again, but not while a process of the last run is left."""

    def __init__(self, check: ExecCheck, output_limit: int) -> None:
        self._check = check
        self._output_limit = output_limit
        self._warden: Child | None = None

    async def run(self) -> CheckOutcome:
        """Run the check once. On return or cancellation every process of it has ended, except those
        that no signal ends: its warden waits for them."""
        if self._warden is not None and self._warden.runs:
            return CheckOutcome(
                CheckHealth.UNKNOWN,
                "is not run again, as a process of its last run cannot be killed: see "
                f"'ps --ppid {self._warden.pid} -o pid,stat,wchan,args'",
            )
        command = bare_python(WARDEN, str(os.getpid()), *self._check.command)
        try:
            self._warden = Child.start(command, stdin=True, stderr=True)
        except (OSError, ValueError) as error:
            return CheckOutcome(CheckHealth.UNKNOWN, f"cannot be started: {in_words(error)}")
        try:
            async with asyncio.timeout(self._check.timeout_s):
                return await self._finished(self._warden)
        except TimeoutError:
            late = f"ran for more than {self._check.timeout_s:g} s"
            return CheckOutcome(CheckHealth.UNKNOWN, late)
        finally:
            # With its stdin closed the warden ends all its descendants. SIGKILL would leave them.
            await asyncio.shield(self._warden.end(END_S, kill=False))

    async def _finished(self, warden: Child) -> CheckOutcome:
        output = await _output(warden, self._output_limit)
        if output is None:
            too_much = f"wrote more than {self._output_limit} bytes"
            return CheckOutcome(CheckHealth.UNKNOWN, too_much)
        return _outcome(await _status_line(warden), output)


def _outcome(status_line: str, output: bytes) -> CheckOutcome:
    word, _, rest = status_line.partition(" ")
    if word == "cannot":
        return CheckOutcome(CheckHealth.UNKNOWN, f"cannot be started: {rest}")
    if word != "status":
        why = f": {status_line}" if status_line else ", perhaps killed"
        return CheckOutcome(CheckHealth.UNKNOWN, f"its warden ended without a status{why}")
    return judge(int(rest), output)


async def _output(warden: Child, limit: int) -> bytes | None:
    """What the check writes until it ends; ``None`` if that is too much.

    A process that it leaves behind may hold the pipe and counts as part of the check.
    """
    found = b""
    while chunk := await warden.read():
        found += chunk
        if len(found) > limit:
            return None
    return found


async def _status_line(warden: Child) -> str:
    """The line that the warden prints; empty if it ended without one."""
    line = b""
    while b"\n" not in line and (chunk := await warden.read_errors()):
        line += chunk
    return line.partition(b"\n")[0].decode("utf-8", "replace")
