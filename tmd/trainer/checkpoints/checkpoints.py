"""Checkpoints of one rank: the main thread begins each at a step boundary, another one writes it.

Ranks exchange no messages about them. A checkpoint is due at the same steps on all ranks, each rank
writes its part, and the worker of rank 0 joins the parts once all exist. A rank that still writes
the previous checkpoint skips the next one. A failure ends only the checkpoint concerned.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from enum import IntEnum
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
from tmd.fabric.backend import ends_by_error
from tmd.trainer.checkpoints import archive
from tmd.trainer.checkpoints.naming import Names
from tmd.trainer.checkpoints.staging import StagedState
from tmd.trainer.state.data import Position
from tmd.trainer.state_transfer.verification import StateVerdict

LOOK_S = 0.2
"""Interval at which a rank checks for the parts of others, which may be on other machines."""
ALL = sys.maxsize
WRITING_S = 60.0
"""Longest time that an ending process waits for its own part of the current checkpoint."""


class Patience(NamedTuple):
    """Longest waits, in seconds."""

    ending_s: float = 5.0
    """For parts that nobody writes now, at the end of a loop and of a process."""
    part_s: float = 1800.0
    """At the end of a loop, for this rank's part. Also for parts of others, unless one is still
    being written and no later checkpoint is due."""


PATIENCE = Patience()

Tell = Callable[[SavedCheckpoint | None, MissedCheckpoint | None], None]
"""Receives the newest checkpoint, and the newest one missed since; any thread."""

log = logging.getLogger("tmd.trainer")


class CheckpointSchedule(NamedTuple):
    """The script's settings."""

    folder: Path
    every: int
    keep: int
    at_end: bool
    """Whether to write a checkpoint at the end of each ``batches()`` call, too."""


class WritingStage(IntEnum):
    """The stage of a checkpoint that is not yet complete."""

    WRITES = 0  # this rank's part, or the whole
    OTHERS_WRITE = 1  # only at rank 0: a part that is still missing is being written
    WAITS = 2  # this rank waits for parts of others
    ENDED = 3  # its thread has ended


class Attempt:
    """A checkpoint that its thread writes or waits for."""

    def __init__(self) -> None:
        self.over = threading.Event()
        """Set once the parts of others are awaited no longer."""
        self.progress = WritingStage.WRITES


class Checkpoints:
    """Public methods: main thread only. Owns a thread for the current checkpoint, and one that is
    ending."""

    def __init__(
        self,
        order: CheckpointSchedule,
        named: Callable[[], Names],
        size: int,
        tell: Tell,
        verdict: Callable[[], StateVerdict],
        *,
        patience: Patience = PATIENCE,
    ) -> None:
        """``verdict``: on the state as it is at a boundary."""
        self._patience = patience
        self._order, self._named, self._size = order, named, size
        self._tell, self._verdict = tell, verdict
        self._at: tuple[int, int | None] = -1, None
        """Step and rank of the latest boundary. The rank is ``None`` if the checkpoint of that step
        exists already. A boundary with the same step and rank is a repeat, which writes nothing."""
        self._staged: StagedState | None = None
        self._attempt = Attempt()
        self._thread: threading.Thread | None = None
        self._former: threading.Thread | None = None
        self._telling = threading.Lock()
        self.run = ""
        """Id of the run; not known to a worker that was a standby at its start."""
        self._saved: SavedCheckpoint | None = None
        self._missed: MissedCheckpoint | None = None

    def passed(self, step: int) -> None:
        """Note that the checkpoint of ``step`` exists: the run has resumed from it."""
        self._at = step, None

    def at_boundary(self, step: int, position: Position, rank: int, seed: int) -> None:
        """``step`` begins; the state must not change before :meth:`settle`."""
        again = self._at in ((step, rank), (step, None))
        self._at = step, rank
        first = (position.index == 0 or position.over) and not self._order.at_end
        if not again and step > 0 and is_due(step, self._order.every, first=first):
            self._stage(step, position, rank, seed)

    def at_end(
        self, step: int, position: Position, rank: int, seed: int, broken: Callable[[], bool]
    ) -> None:
        """Write a checkpoint before the vote that ends a ``batches()`` call, if the schedule asks
        for one. Returns once this rank's part is written, since the process may end next, or once
        ``broken()`` is true: then the caller calls it again after the repair."""
        if not self._order.at_end:
            return
        self._await(WritingStage.WAITS, self._patience.part_s, broken)
        if self._at in ((step, rank), (step, None)) or broken():
            return
        # Once the last checkpoint is staged, the previous one waits no longer for other ranks.
        self._await(WritingStage.ENDED, self._patience.ending_s, broken)
        # Another rank may have begun since.
        self._await(WritingStage.WAITS, self._patience.part_s, broken)
        self._at = step, rank
        self._stage(step, position, rank, seed)
        self.settle()
        self._await(WritingStage.OTHERS_WRITE, self._patience.part_s, broken)

    def _stage(self, step: int, position: Position, rank: int, seed: int) -> None:
        if self._reached < WritingStage.WAITS:
            self._misses(step, "the previous checkpoint is still being written")
            return
        self._attempt.over.set()
        attempt, former = Attempt(), self._thread
        try:
            staged = StagedState(self._named(), rank, step, position, seed)
            thread = threading.Thread(
                target=self._save,
                args=(staged, attempt, self._verdict(), former),
                name="tmd-checkpoint",
                daemon=True,
            )
            thread.start()
        except Exception as error:
            self._misses(step, error)
            return
        # The former thread may wait for a slow disk, which must not delay the step.
        self._staged, self._attempt, self._thread, self._former = staged, attempt, thread, former

    @property
    def _reached(self) -> WritingStage:
        """How far the current checkpoint is."""
        alive = self._thread is not None and self._thread.is_alive()
        return self._attempt.progress if alive else WritingStage.ENDED

    def settle(self, *, torn: bool = False) -> None:
        """Copy the remaining state, which may change afterwards. ``torn``: it may have changed
        already, as when SAM begins in this step; the checkpoint is then missed."""
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.finish()
            if torn:
                staged.broken = StateMismatch("parameters may have changed while they were copied")
            staged.settled.set()

    def close(self) -> None:
        """Wait for the thread, since none may be inside torch when the process ends."""
        self.settle(torn=True)  # the process ends within the step
        if self._thread is not None:
            self._await(WritingStage.OTHERS_WRITE, WRITING_S, lambda: False)
            # No rank has waited for the parts of others if there was no vote, as under torchrun.
            # The rank of a process that ends by an error is not replaced until it is gone.
            patient = self._order.at_end and not ends_by_error()
            self._thread.join(WRITING_S if patient else self._patience.ending_s)
            self._attempt.over.set()
            for thread in (self._thread, self._former):
                if thread is not None:
                    thread.join(self._patience.ending_s)

    def _await(self, wanted: WritingStage, seconds: float, stop: Callable[[], bool]) -> None:
        """Wait until the current checkpoint has come as far as ``wanted``."""
        deadline = time.monotonic() + seconds
        while self._thread is not None and self._reached < wanted:
            if stop() or time.monotonic() > deadline:
                return
            self._thread.join(LOOK_S)

    # --- the writer's thread ----------------------------------------------------------------------

    def _save(
        self,
        staged: StagedState,
        attempt: Attempt,
        verdict: StateVerdict,
        former: threading.Thread | None,
    ) -> None:
        folder, step = self._order.folder, staged.step
        try:
            staged.finish()
            if staged.broken is not None:
                raise staged.broken
            if why := verdict():
                # If the step is repeated, the state is another one, and the part is written then.
                self._at = -1, None
                raise StateMismatch(why)
            if former is not None:
                # It still reports the parts that it waited for.
                former.join(self._patience.ending_s)
            if staged.rank == 0:
                # Parts of missed checkpoints: the disk may have no room for them and this one.
                self._prune(step, keep=ALL)
            if not archive.is_complete(folder, step):
                self._write(staged)
            self._complete(staged, attempt)
        except Exception as error:
            # No error of a checkpoint may reach training.
            self._misses(step, error)

    def _write(self, staged: StagedState) -> None:
        folder = self._order.folder
        try:
            archive.write_part(folder, staged, self._size, self.run)
            staged.release()
        except FileNotFoundError:
            # Another worker of the rank has written its part, and the parts were joined.
            if not archive.is_complete(folder, staged.step):
                raise

    def _complete(self, staged: StagedState, attempt: Attempt) -> None:
        """Wait until the checkpoint is complete. The worker of rank 0 joins its parts."""
        folder, step = self._order.folder, staged.step
        deadline = time.monotonic() + self._patience.part_s
        while not archive.is_complete(folder, step):
            missing = archive.parts_missing(folder, step, self._size) if staged.rank == 0 else []
            if staged.rank == 0 and not missing:
                attempt.progress = WritingStage.WRITES
                if self._join(step):
                    continue
            # While others write, rank 0 begins no later checkpoint, which would remove the folder.
            writing = bool(missing) and archive.being_written(folder, step, missing)
            timed_out = time.monotonic() > deadline
            others_write = writing and not timed_out
            attempt.progress = WritingStage.OTHERS_WRITE if others_write else WritingStage.WAITS
            # A worker that has given its rank away begins no later one, which would end this wait.
            ends = attempt.over.wait(LOOK_S) or (timed_out and not writing)
            if ends and not archive.is_complete(folder, step):
                self._waited_in_vain(staged, timed_out=not attempt.over.is_set())
                return
        self._has(SavedCheckpoint(step, time.time(), str(folder / name_of(step))))
        if staged.rank == 0:
            self._prune(step, keep=self._order.keep)

    def _waited_in_vain(self, staged: StagedState, *, timed_out: bool) -> None:
        if timed_out and staged.rank != 0:
            return  # rank 0 knows whether one is being written
        missing = archive.parts_missing(self._order.folder, staged.step, self._size)
        # A rank that failed reports why itself; rank 0 reports for one that is gone.
        ranks = ", ".join(map(str, missing))
        why = f"no part of rank {ranks} in time" if ranks else "its parts were not joined in time"
        if staged.rank == 0:
            self._misses(staged.step, why)
        else:
            log.warning("no checkpoint of step %d: %s", staged.step, why)

    def _prune(self, step: int, *, keep: int) -> None:
        try:
            prune(self._order.folder, keep, partial_before=step)
        except OSError as error:
            # The next checkpoint tries again.
            log.warning("older checkpoints could not be removed: %s", error)

    def _join(self, step: int) -> bool:
        """Join the parts; ``False`` while another worker of rank 0 does."""
        try:
            archive.join_parts(self._order.folder, step, self._size)
        except BlockingIOError:
            return False
        except OSError:
            # The previous worker of rank 0 may have been faster.
            if not archive.is_complete(self._order.folder, step):
                raise
        return True

    # --- reports, from both threads ---------------------------------------------------------------

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
    """Remove the oldest checkpoints above ``keep`` and outdated parts."""
    for name in unneeded(os.listdir(folder), keep, partial_before=partial_before):
        place = folder / name
        gone = place.with_name(name.removesuffix(GONE) + GONE)
        # A folder that is half removed must not look complete.
        place.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
