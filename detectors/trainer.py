"""Detects from outside the process that a trainer exited, fell silent or stands still.

Seven more findings are for people and move no rank, since a new host would not help: a worker was
killed for memory, its loss is not a number, a due checkpoint failed, its script changes a state
that is not registered or keeps an old rank, a standby is unfit for ranks, or it refused one.
"""

from __future__ import annotations

import math
import re
import signal
from collections import deque
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, ClassVar

from msgspec import Meta

from tmd.plugin import (
    Activity,
    Detector,
    DetectorConfig,
    DetectorContext,
    Exit,
    NotNegative,
    Severity,
    Signal,
    State,
    WorkerEvent,
    WorkerStatus,
)

EXITED = "trainer.exited"
STALLED = "trainer.stalled"
HUNG = "trainer.hung"
OUT_OF_MEMORY = "trainer.out_of_memory"
NAN_LOSS = "trainer.nan_loss"
NO_CHECKPOINT = "trainer.no_checkpoint"
UNREGISTERED = "trainer.unregistered_state"
RANK_KEPT = "trainer.rank_kept"
UNFIT = "standby.unfit"
REFUSED = "standby.refused"
FOR_PEOPLE = {
    OUT_OF_MEMORY,
    NAN_LOSS,
    NO_CHECKPOINT,
    UNREGISTERED,
    RANK_KEPT,
    UNFIT,
    REFUSED,
}
FRESH_S = 10.0
"""A kill for memory explains an exit by SIGKILL that follows within this time."""
LOOK_S = 1.0
"""Least time between two readings of the count."""
KEPT = int(FRESH_S / LOOK_S) + 2
"""Readings that are kept: those of the last ``FRESH_S``, and one before."""


class TrainerConfig(DetectorConfig, frozen=True, forbid_unknown_fields=True):
    heartbeat_timeout_s: Annotated[float, Meta(ge=1)] = 30.0
    """Silence of a connected trainer's agent thread, which reports every half second. It means that
    the process is stopped or something holds the interpreter."""
    progress_timeout_s: NotNegative = 0.0
    """A trainer that reports, waits for no peer and commits no step for this long hangs, and is
    killed. 0, the default, is off. Set it above the longest evaluation or checkpoint."""
    proc_root: str = "/proc"
    """Where procfs is mounted."""


class TrainerDetector(Detector):
    name: ClassVar[str] = "trainer"
    Config: ClassVar[type[DetectorConfig]] = TrainerConfig
    deadline_s: ClassVar[float | None] = 30.0

    def __init__(self) -> None:
        self._findings: TrainerFindings | None = None

    def declared_healthy(self, code: str) -> None:
        if self._findings is not None:
            self._findings.state_again(code)

    async def watch(self, ctx: DetectorContext) -> AsyncIterator[Signal]:
        config = ctx.config
        assert isinstance(config, TrainerConfig)
        findings, kills = TrainerFindings(config), Kills(Path(config.proc_root))
        self._findings = findings
        async for event in ctx.worker_events():
            if event.exit is None:
                kills.look(ctx.now())
            killed = event.exit is not None and event.exit.code == -signal.SIGKILL
            starved = killed and not event.forgotten and kills.explains(ctx.now())
            for found in findings.observe(event, ctx.now(), starved=starved):
                yield found


class Kills:
    """The kernel's count of processes killed for memory, in any cgroup."""

    def __init__(self, proc_root: Path) -> None:
        self._file = proc_root / "vmstat"
        self._seen: deque[tuple[float, int]] = deque(maxlen=KEPT)
        """When the count was read, and what it was."""
        self._explained = 0
        """The count up to which kills have explained an exit."""

    def look(self, now: float) -> None:
        """Read the count, unless that was done a moment ago."""
        if self._seen and now - self._seen[-1][0] < LOOK_S:
            return
        if self._seen and now - self._seen[-1][0] > FRESH_S:
            self._seen.clear()  # kills since the last reading cannot be dated
        if (count := self._count()) is not None:
            self._seen.append((now, count))

    def explains(self, now: float) -> bool:
        """Whether a kill of the last ``FRESH_S`` explains an exit at ``now``; each explains one."""
        while len(self._seen) > 1 and now - self._seen[1][0] >= FRESH_S:
            self._seen.popleft()
        count = self._count()
        if count is None or not self._seen:
            return False
        before = max(self._seen[0][1], self._explained)
        if count > before:
            self._explained = before + 1
        return count > before

    def _count(self) -> int | None:
        try:
            found = re.search(r"^oom_kill ([0-9]+)$", self._file.read_text(), re.MULTILINE)
        except OSError:
            return None
        return int(found[1]) if found else None


class TrainerFindings:
    """Turns events into signals; reports each finding once."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._raised: set[tuple[str, str]] = set()
        self._progress: dict[str, tuple[tuple[int, int], float]] = {}
        """worker -> (epoch, step) and since when it has been there without waiting for peers."""

    def observe(self, event: WorkerEvent, now: float, *, starved: bool = False) -> Iterator[Signal]:
        """``starved``: the kernel killed a process for memory just before this exit."""
        if event.exit is not None and event.exit.code is None and not event.forgotten:
            return  # its exit status follows
        if event.forgotten or event.exit is not None:
            self._progress.pop(event.worker, None)
            yield from self._set(STALLED, False, event, "")
            yield from self._set(HUNG, False, event, "")
            yield from self._set(NAN_LOSS, False, event, "")
            yield from self._set(NO_CHECKPOINT, False, event, "")
            yield from self._set(UNREGISTERED, False, event, "")
            yield from self._set(RANK_KEPT, False, event, "")
            yield from self._set(UNFIT, False, event, "")
            yield from self._set(REFUSED, False, event, "")
            text = "probably killed by the kernel for lack of memory"
            starved = not event.forgotten and (
                starved or (OUT_OF_MEMORY, event.worker) in self._raised
            )
            yield from self._set(OUT_OF_MEMORY, starved, event, text)
            failed = event.exit is not None and event.exit.code != 0 and not event.forgotten
            message = _how_it_ended(event.exit, event.status) if event.exit else ""
            yield from self._set(EXITED, failed, event, message)
            return
        if not event.connected:
            return  # unknown: only the launcher reports whether it exited
        silent = event.silent_s > self._config.heartbeat_timeout_s
        yield from self._set(STALLED, silent, event, f"silent for {event.silent_s:.1f} s")
        stands = self._stands_s(event.worker, event.status, now)
        limit = self._config.progress_timeout_s
        hung = not silent and 0 < limit < stands
        yield from self._set(HUNG, hung, event, f"no step committed for {stands:.0f} s")
        yield from self._loss(event)
        yield from self._checkpoint(event)
        yield from self._reported(event)

    def state_again(self, code: str) -> None:
        """Report once more that a worker is silent or hangs, if it still does. ``code`` limits this
        to one finding; empty means both. No declaration of an operator starts such a worker, and
        its job waits until it is replaced."""
        again = {c for c in (STALLED, HUNG) if code in ("", c)}
        self._raised = {key for key in self._raised if key[0] not in again}

    def _reported(self, event: WorkerEvent) -> Iterator[Signal]:
        status = event.status
        if status is None:
            return
        yield from self._set(UNREGISTERED, bool(status.unregistered), event, status.unregistered)
        yield from self._set(RANK_KEPT, bool(status.rank_kept), event, status.rank_kept)
        yield from self._set(UNFIT, bool(status.unfit), event, status.unfit)
        refused = status.activity is Activity.REFUSED
        text = f"it refused a rank in plan {status.plan}: {status.detail}"
        yield from self._set(REFUSED, refused, event, text)

    def _loss(self, event: WorkerEvent) -> Iterator[Signal]:
        loss = event.status.loss if event.status is not None else None
        if loss is not None:
            text = f"the loss is {loss} at step {event.status.step if event.status else 0}"
            yield from self._set(NAN_LOSS, not math.isfinite(loss), event, text)

    def _checkpoint(self, event: WorkerEvent) -> Iterator[Signal]:
        missed = event.status.missed if event.status is not None else None
        text = ""
        if missed is not None:
            text = f"no checkpoint of step {missed.step}: {missed.reason} ({missed.count} in a row)"
        yield from self._set(NO_CHECKPOINT, missed is not None, event, text)

    def _stands_s(self, worker: str, status: WorkerStatus | None, now: float) -> float:
        """How long the worker has been at one step without waiting for peers."""
        if status is None or status.activity is not Activity.TRAINING or status.waiting:
            self._progress.pop(worker, None)
            return 0.0
        place = (status.epoch, status.step)
        known = self._progress.get(worker)
        if known is None or known[0] != place:
            self._progress[worker] = (place, now)
            return 0.0
        return now - known[1]

    def _set(self, code: str, holds: bool, event: WorkerEvent, message: str) -> Iterator[Signal]:
        key = (code, event.worker)
        if holds == (key in self._raised):
            return
        if holds:
            self._raised.add(key)
        else:
            self._raised.discard(key)
        yield Signal(
            code=code,
            entity=event.worker,
            severity=Severity.WARNING if code in FOR_PEOPLE else Severity.FATAL,
            state=State.RAISED if holds else State.CLEARED,
            message=message if holds else "",
            job=event.job,
            event=event.worker if code == EXITED else "",
        )


def _how_it_ended(exit_: Exit, status: WorkerStatus | None) -> str:
    code = exit_.code
    how = (
        f"killed by signal {-code}"
        if code is not None and code < 0
        else f"ended with status {code}"
    )
    return f"{how} as a standby" if status is not None and status.rank is None else how
