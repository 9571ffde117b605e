"""What can be seen of a training process from outside: it ended, fell silent, or stands still."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import ClassVar

from tmd.plugin import (
    Activity,
    Detector,
    DetectorConfig,
    DetectorContext,
    Exit,
    Severity,
    Signal,
    State,
    WorkerEvent,
    WorkerStatus,
)

EXITED = "trainer.exited"
STALLED = "trainer.stalled"
HUNG = "trainer.hung"


class TrainerConfig(DetectorConfig, frozen=True, forbid_unknown_fields=True):
    heartbeat_timeout_s: float = 30.0
    """Silence of a connected trainer's agent thread (it speaks every half second): the process is
    stopped, or something holds the interpreter."""
    progress_timeout_s: float = 0.0
    """A trainer that speaks, waits for nobody and commits no step for so long hangs. 0, the
    default, is off: an evaluation or a checkpoint looks the same, and whoever is named is ended."""


class TrainerDetector(Detector):
    name: ClassVar[str] = "trainer"
    Config: ClassVar[type[DetectorConfig]] = TrainerConfig
    deadline_s: ClassVar[float | None] = 30.0

    async def watch(self, ctx: DetectorContext) -> AsyncIterator[Signal]:
        config = ctx.config
        assert isinstance(config, TrainerConfig)
        findings = Findings(config)
        async for event in ctx.worker_events():
            for signal in findings.observe(event, ctx.now()):
                yield signal


class Findings:
    """Folds events into signals; says each thing once."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._raised: set[tuple[str, str]] = set()
        self._progress: dict[str, tuple[tuple[int, int], float]] = {}
        """worker -> (epoch, step) and since when it has been there without waiting for others."""

    def observe(self, event: WorkerEvent, now: float) -> Iterator[Signal]:
        if event.forgotten or event.exit is not None:
            self._progress.pop(event.worker, None)
            yield from self._set(STALLED, False, event, "")
            yield from self._set(HUNG, False, event, "")
            failed = event.exit is not None and event.exit.code != 0 and not event.forgotten
            message = _how_it_ended(event.exit) if event.exit else ""
            yield from self._set(EXITED, failed, event, message)
            return
        if not event.connected:
            return  # doubt: whether it ended is the launcher's word
        silent = event.silent_s > self._config.heartbeat_timeout_s
        yield from self._set(STALLED, silent, event, f"silent for {event.silent_s:.1f} s")
        stands = self._stands_s(event.worker, event.status, now)
        limit = self._config.progress_timeout_s
        hung = not silent and 0 < limit < stands
        yield from self._set(HUNG, hung, event, f"no step committed for {stands:.0f} s")

    def _stands_s(self, worker: str, status: WorkerStatus | None, now: float) -> float:
        """How long the worker has stood at one step of its own accord."""
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
            severity=Severity.FATAL,
            state=State.RAISED if holds else State.CLEARED,
            message=message,
            job=event.job,
        )


def _how_it_ended(exit_: Exit) -> str:
    if exit_.code < 0:
        return f"killed by signal {-exit_.code}"
    return f"ended with status {exit_.code}"
