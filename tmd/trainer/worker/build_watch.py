"""Watches training while groups of the next epoch are built beside it.

A build that stalls training is given up: the move is dropped. If the operations of the present
groups still do not end, the step is broken, which aborts them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from tmd.core.values.model import Activity, WorkerStatus
from tmd.core.worker.build_stall import Stall, stall
from tmd.fabric import Fabric

LOOK_S = 0.5

OnBuilt = Callable[[str], None]
"""Called with the reason why the groups cannot be built, or with an empty one once they are."""


class TrainingProgress(NamedTuple):
    """How far training has come."""

    epoch: int
    trains: bool
    """Whether this worker trains, and its step is not broken."""
    step: int
    calls: int
    """Operations that the script has called."""
    quiet: bool
    """Whether no operation runs."""
    step_s: float
    """Duration of the latest step."""


class BuildWatch:
    """Owns a thread while groups are built.

    Args:
        progress: reads how far training is.
        building: whether a build runs, dropped ones included.
        break_step: ends all operations of the present step.
    """

    def __init__(
        self,
        progress: Callable[[], TrainingProgress],
        building: Callable[[], bool],
        break_step: Callable[[str], None],
        *,
        look_s: float = LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress, self._building, self._break = progress, building, break_step
        self._look_s, self._clock = look_s, clock
        self._changing = threading.Lock()
        self.active = False
        """Whether the thread runs."""
        self._refuse: OnBuilt | None = None
        """Gives up the latest build, unless that was done."""
        self._since = 0.0
        """When the latest build began."""

    @classmethod
    def over(cls, fabric: Fabric, status: Callable[[], WorkerStatus]) -> BuildWatch:
        """A watch over the training of ``fabric``."""

        def progress() -> TrainingProgress:
            now = status()
            trains = now.activity is Activity.TRAINING and not fabric.poisoned
            return TrainingProgress(
                *(now.epoch, trains, now.step),
                calls=fabric.calls.begun,
                quiet=fabric.quiet,
                step_s=now.step_seconds,
            )

        return cls(progress, lambda: fabric.generations.building, fabric.poison)

    def build(self, start: Callable[[OnBuilt], None], done: OnBuilt) -> None:
        """Call ``start`` with a function that is to be called at the end of a build, and watch as
        long as any build runs, also a dropped one. ``done`` is called once: at the end of this
        build, or when it is given up."""
        done = _once(done)
        start(done)
        with self._changing:
            self._refuse, self._since = done, self._clock()
            if self.active or not self._building():
                return
            self.active = True
        threading.Thread(target=self._run, name="tmd-build-watch", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        first = seen = self._progress()
        committed_at = called_at = self._clock()
        while self._goes_on(first, seen):
            pause.wait(self._look_s)
            before, seen, now = seen, self._progress(), self._clock()
            if seen.step != before.step or not seen.trains:
                committed_at = now
            if seen.quiet or seen.calls != before.calls or not seen.trains:
                called_at = now
            idle_s = now - max(committed_at, self._since)
            match stall(idle_s, now - called_at, seen.step_s):
                case Stall.BLOCKED:
                    self._break("groups that are being built for the next epoch block this step")
                    called_at = now
                case Stall.STALLED if self._refuse is not None:
                    self._refuse(
                        f"no step was committed for {idle_s:.0f} s during a build of groups"
                    )
                    self._refuse = None
                case _:
                    pass

    def _goes_on(self, first: TrainingProgress, seen: TrainingProgress) -> bool:
        """After a loss operations wait for the groups of their own epoch, however long these take
        to be built."""
        with self._changing:
            self.active = self._building() and seen.epoch == first.epoch
            return self.active


def _once(done: OnBuilt) -> OnBuilt:
    called = threading.Lock()

    def call(why: str) -> None:
        if called.acquire(blocking=False):
            done(why)

    return call
