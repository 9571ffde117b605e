"""One snapshot of this rank: copied while the parameters stand still, then brought to its keeper.

The copy is made of the pieces that a live shadow gets, but all of one step: what is not copied when
the window closes comes to nothing, for training never waits.
"""

from __future__ import annotations

import logging
import threading
import time
from enum import IntEnum

from tmd.core.values.errors import LinkError
from tmd.core.values.model import Member
from tmd.fabric import Link
from tmd.trainer.protocol import frames
from tmd.trainer.protocol.copies import StateCopy, digest_of_bodies
from tmd.trainer.protocol.frames import Boundary, Bring, Envelope, Stored, Unit
from tmd.trainer.protocol.outbox import Entry, Outbox
from tmd.trainer.state.data import Position
from tmd.trainer.state.state import Layouts
from tmd.trainer.state.units import Units
from tmd.trainer.state.window import Window
from tmd.trainer.state_transfer.verification import Verdict

log = logging.getLogger("tmd.trainer")


class WriterStage(IntEnum):
    """How far it is, as told in votes; the least that any rank tells is what counts."""

    FAILED = 0
    GOING = 1
    DONE = 2


class SnapshotWriter:
    """Begun by the main thread in the open window; the rest is the sender's."""

    def __init__(self, rank: int, step: int, keeper: Member, verdict: Verdict) -> None:
        """``verdict``: on the state as it is now."""
        self.rank = rank
        self.step = step
        self.keeper = keeper
        self.verdict = verdict
        self.stage = WriterStage.GOING
        self.over = threading.Event()
        """Set once its outcome does not matter any more."""
        self._entries: list[Entry] = []
        self._buckets = ""

    def fail(self, why: str) -> None:
        """It comes to nothing."""
        if self.stage is WriterStage.GOING:
            self.stage = WriterStage.FAILED
            if not self.over.is_set():
                log.info("snapshot of step %d given up: %s", self.step, why)

    def begin(self, position: Position, units: Units, outbox: Outbox, buckets: str) -> None:
        """Main thread, between two steps: copy all that is no unit."""
        self._buckets = buckets
        layout, tensors = units.rest()
        boundary = Boundary(self.step, position, layout, units.graded)
        self._add(outbox.copy(boundary, tensors))

    def copy(self, units: Units, window: Window, outbox: Outbox) -> tuple[Entry, ...]:
        """Copy every unit; all that was copied before the window closed or memory ran out."""
        for number in range(len(units)):
            with window.reading() as version:
                if version != self.step:
                    self.fail("the step was over before all was copied")
                elif self.stage is WriterStage.GOING:
                    layout, tensors = units.collect(number)
                    self._add(outbox.copy(Unit(self.step, number, layout), tensors))
            if self.stage is not WriterStage.GOING:
                break
        return tuple(self._entries)

    def _add(self, entry: Entry | None) -> None:
        if entry is None:
            self.fail("the host memory for copies is used up")
        else:
            self._entries.append(entry)

    def made(self, layouts: Layouts, entries: tuple[Entry, ...]) -> StateCopy:
        """What was copied, as it is kept here and there."""
        digest = digest_of_bodies(entries)
        return StateCopy(self.rank, self.step, layouts, entries, digest, self._buckets)

    def bring(self, link: Link, copy: StateCopy, rate: float) -> None:
        """Send it, at ``rate`` bytes per second at most, and wait for the keeper's word.

        Raises:
            LinkError: the keeper is gone.
        """
        send_copy(link, copy, rate=rate, over=self.over)
        answer, _ = frames.receive(link)
        if not isinstance(answer, Stored):
            raise LinkError(f"{link.peer} answered with {type(answer).__name__}")
        if answer.refusal:
            self.fail(f"{link.peer} does not keep it: {answer.refusal}")
        elif self.stage is WriterStage.GOING:
            self.stage = WriterStage.DONE


def send_copy(
    link: Link, copy: StateCopy, *, rate: float = 0.0, over: threading.Event | None = None
) -> None:
    """Send a copy whole; ``rate`` bytes per second at most, 0 for as fast as it goes.

    Raises:
        LinkError: the other side is gone, or it is ``over`` meanwhile.
    """
    units = len(copy.entries) - 1
    bring = Bring(copy.rank, copy.step, units, copy.layouts, copy.digest, copy.buckets)
    frames.send(link, Envelope(bring))
    ready_at = time.monotonic()
    for envelope, body in copy.entries:
        if over is not None and over.wait(max(0.0, ready_at - time.monotonic())):
            raise LinkError("the snapshot is not wanted any more")
        frames.send(link, envelope, body)
        if rate:
            ready_at = max(time.monotonic(), ready_at) + body.numel() / rate


def receive_copy(link: Link, bring: Bring) -> StateCopy | None:
    """The rest of what ``bring`` announced; ``None`` if other bytes arrived than were sent.

    Raises:
        LinkError: the other side is gone.
    """
    entries = tuple(frames.receive_whole(link) for _ in range(bring.units + 1))
    if digest_of_bodies(entries) != bring.digest:
        return None
    return StateCopy(bring.rank, bring.step, bring.layouts, entries, bring.digest, bring.buckets)
