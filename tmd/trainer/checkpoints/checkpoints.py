"""Checkpoints of one rank: begun by the main thread at a step boundary, written by another.

No rank speaks to another about them: all take those of the same steps, each writes its part, and
the worker of rank 0 joins the parts once all are there. Whatever goes wrong with one ends that one.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tmd.core.values.checkpoints import (
    GONE,
    MissedCheckpoint,
    SavedCheckpoint,
    is_due,
    missed_too,
    name_of,
    still_missed,
    unneeded,
)
from tmd.core.values.errors import StateMismatch
from tmd.trainer.checkpoints import archive
from tmd.trainer.checkpoints.naming import Names
from tmd.trainer.checkpoints.staging import StagedState
from tmd.trainer.state.data import Position
from tmd.trainer.state_transfer.verification import Verdict

LOOK_S = 0.2
"""How often a rank looks whether the others have written theirs; it may be on other machines."""
WRITING_S = 60.0
"""How long a process that ends waits for its own part of the checkpoint under way, and ..."""
ENDING_S = 5.0
"""... for those of others after that."""

Tell = Callable[[SavedCheckpoint | None, MissedCheckpoint | None], None]
"""Hears of the newest checkpoint, and of the newest that came to nothing since; any thread."""

log = logging.getLogger("tmd.trainer")


class CheckpointSchedule(NamedTuple):
    """What a script asks for."""

    folder: Path
    every: int
    keep: int


class Checkpoints:
    """For the main thread; owns a thread for the checkpoint under way."""

    def __init__(
        self,
        order: CheckpointSchedule,
        named: Callable[[], Names],
        size: int,
        tell: Tell,
        verdict: Callable[[], Verdict],
        *,
        ending_s: float = ENDING_S,
    ) -> None:
        """``verdict``: on the state as it is at a boundary."""
        self._ending_s = ending_s
        self._order, self._named, self._size = order, named, size
        self._tell, self._verdict = tell, verdict
        self._at = -1
        """Step of the latest boundary: the same again is a step that is repeated."""
        self._staged: StagedState | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._waits = False
        """The thread only waits for others."""
        self._telling = threading.Lock()
        self._saved: SavedCheckpoint | None = None
        self._missed: MissedCheckpoint | None = None

    def passed(self, step: int) -> None:
        """There is no need for one of ``step``."""
        self._at = step

    def at_boundary(self, step: int, position: Position, rank: int, seed: int) -> None:
        """``step`` begins; nothing of the state changes until :meth:`settle`."""
        again, self._at = step == self._at, step
        if again or step == 0 or not is_due(step, self._order.every, first=position.index == 0):
            return
        if self._thread is not None and self._thread.is_alive() and not self._waits:
            self._misses(step, "the one before is still being written")
            return
        self._end()
        try:
            staged = StagedState(self._named(), rank, step, position, seed)
        except Exception as error:
            self._misses(step, error)
            return
        self._staged = staged
        self._over, self._waits = threading.Event(), False
        self._thread = threading.Thread(
            target=self._save,
            args=(staged, self._over, self._verdict()),
            name="tmd-checkpoint",
            daemon=True,
        )
        self._thread.start()

    def settle(self) -> None:
        """Something may change from here on: all is copied when this returns."""
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.finish()

    def close(self) -> None:
        """The process ends: no thread may be inside torch then."""
        self.settle()
        if self._thread is not None:
            deadline = time.monotonic() + WRITING_S
            while self._thread.is_alive() and not self._waits and time.monotonic() < deadline:
                self._thread.join(LOOK_S)
            self._thread.join(self._ending_s)
            self._end()

    def _end(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(self._ending_s)

    # --- the writer's thread ----------------------------------------------------------------------

    def _save(self, staged: StagedState, over: threading.Event, verdict: Verdict) -> None:
        folder, step = self._order.folder, staged.step
        try:
            staged.finish()
            if staged.broken is not None:
                raise staged.broken
            if why := verdict():
                # Who holds the rank then writes its part.
                self._at = -1
                raise StateMismatch(why)
            if not archive.is_complete(folder, step):
                archive.write_part(folder, staged, self._size)
            self._await(staged, over)
        except Exception as error:
            # Whatever it was: training must not know of it.
            self._misses(step, error)

    def _await(self, staged: StagedState, over: threading.Event) -> None:
        """Until there is a whole one. The worker of rank 0 sees to that."""
        folder, step = self._order.folder, staged.step
        while not archive.is_complete(folder, step):
            if staged.rank == 0 and not archive.parts_missing(folder, step, self._size):
                self._join(step)
                continue
            self._waits = True
            if over.wait(LOOK_S) and not archive.is_complete(folder, step):
                self._waited_in_vain(staged)
                return
            self._waits = False
        self._has(SavedCheckpoint(step, time.time(), str(folder / name_of(step))))
        if staged.rank == 0:
            self._prune(step)

    def _waited_in_vain(self, staged: StagedState) -> None:
        missing = archive.parts_missing(self._order.folder, staged.step, self._size)
        # Those whose fault it is tell why; of one that is gone rank 0 does.
        late = f"no part of rank {', '.join(map(str, missing))} in time"
        if staged.rank == 0:
            self._misses(staged.step, late if missing else "it was not whole in time")
        else:
            log.warning("no checkpoint of step %d: %s", staged.step, late)

    def _prune(self, step: int) -> None:
        try:
            prune(self._order.folder, self._order.keep, partial_before=step)
        except OSError as error:
            # There is a checkpoint all the same; the next one tries again.
            log.warning("older checkpoints stay: %s", error)

    def _join(self, step: int) -> None:
        try:
            archive.join_parts(self._order.folder, step, self._size)
        except OSError:
            # Who held rank 0 before may have been faster.
            if not archive.is_complete(self._order.folder, step):
                raise

    # --- what is told, from both threads ----------------------------------------------------------

    def _has(self, saved: SavedCheckpoint) -> None:
        with self._telling:
            self._saved, self._missed = saved, still_missed(self._missed, saved)
            self._tell(self._saved, self._missed)

    def _misses(self, step: int, why: object) -> None:
        with self._telling:
            self._missed = missed_too(self._missed, step, str(why))
            self._tell(self._saved, self._missed)
            count = self._missed.count
        log.error("no checkpoint of step %d: %s (%d in a row)", step, why, count)


def prune(folder: Path, keep: int, *, partial_before: int) -> None:
    """Remove what nobody needs any more."""
    for name in unneeded(os.listdir(folder), keep, partial_before=partial_before):
        place = folder / name
        gone = place.with_name(name.removesuffix(GONE) + GONE)
        # A folder that is half gone must not look complete.
        place.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
