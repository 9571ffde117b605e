"""One snapshot of this rank: copied while the parameters do not change, then sent to its keeper.

The copy consists of the same pieces as for a live shadow, but all of one step. If the window closes
before all is copied the snapshot fails, since training never waits.
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
from tmd.trainer.protocol.outbox import Outbox, OutboxEntry
from tmd.trainer.state.data import Position
from tmd.trainer.state.layout import Layouts
from tmd.trainer.state.units import Units
from tmd.trainer.state.window import Window
from tmd.trainer.state_transfer.verification import StateVerdict

log = logging.getLogger("tmd.trainer")

PAUSE_S = 0.25
"""Longest pause between two pieces of a slow copy, far below the patience of any link."""


class WriterStage(IntEnum):
    """Stage of a snapshot as reported in votes, where the lowest of any rank counts."""

    FAILED = 0
    GOING = 1
    DONE = 2


class SnapshotWriter:
    """Created by the main thread in the open window, then used by the sender's thread."""

    def __init__(
        self,
        rank: int,
        step: int,
        keeper: Member,
        verdict: StateVerdict,
        stored: StateCopy | None = None,
    ) -> None:
        """``verdict``: on the current state. ``stored``: a copy of it that is here already, as
        after a roll-back. It is brought to the keeper, which may be another one now."""
        self.rank = rank
        self.step = step
        self.keeper = keeper
        self.verdict = verdict
        self.stored = stored
        self.stage = WriterStage.GOING
        self.torn = False
        """Whether the step changed parameters that were being copied."""
        self.over = threading.Event()
        """Set once the outcome no longer matters."""
        self._entries: list[OutboxEntry] = []

    def fail(self, why: str) -> None:
        """Mark the snapshot as failed."""
        if self.stage is WriterStage.GOING:
            self.stage = WriterStage.FAILED
            if not self.over.is_set():
                log.info("snapshot of step %d given up: %s", self.step, why)

    def begin(self, position: Position, units: Units, outbox: Outbox) -> None:
        """Main thread, between two steps: copy everything that is not a unit."""
        layout, tensors = units.rest()
        boundary = Boundary(self.step, position, layout, units.graded)
        self._add(outbox.copy(boundary, tensors))

    def copy(self, units: Units, window: Window, outbox: Outbox) -> tuple[OutboxEntry, ...]:
        """Copy units until the window closes or memory runs out; returns the rest and the units."""
        for number in range(len(units)):
            with window.reading() as version:
                if version != self.step:
                    self.fail("the step ended before all was copied")
                elif self.stage is WriterStage.GOING:
                    layout, tensors = units.at_start(number)
                    self._add(outbox.copy(Unit(self.step, number, layout), tensors))
            if self.stage is not WriterStage.GOING:
                break
        return tuple(self._entries)

    def _add(self, entry: OutboxEntry | None) -> None:
        if entry is None:
            self.fail("the host memory for copies is used up")
        else:
            self._entries.append(entry)

    def made(self, layouts: Layouts, entries: tuple[OutboxEntry, ...]) -> StateCopy:
        """The finished copy, as stored here and at the keeper."""
        return StateCopy(self.rank, self.step, layouts, entries, digest_of_bodies(entries))

    def bring(self, link: Link, copy: StateCopy, rate: float) -> None:
        """Send it, at ``rate`` bytes per second at most, and wait for the keeper's answer.

        Raises:
            LinkError: the keeper is gone.
        """
        send_copy(link, copy, rate=rate, over=self.over)
        answer, _ = frames.receive(link)
        if not isinstance(answer, Stored):
            raise LinkError(f"{link.peer} answered with {type(answer).__name__}")
        if answer.refusal:
            self.fail(f"{link.peer} does not store it: {answer.refusal}")
        elif self.stage is WriterStage.GOING:
            self.stage = WriterStage.DONE


def send_copy(
    link: Link, copy: StateCopy, *, rate: float = 0.0, over: threading.Event | None = None
) -> None:
    """Send a whole copy, at ``rate`` bytes per second at most, 0 for no limit.

    Raises:
        LinkError: the other side is gone, or ``over`` was set meanwhile.
    """
    units = len(copy.entries) - 1
    bring = Bring(copy.rank, copy.step, units, copy.layouts, copy.digest)
    frames.send(link, Envelope(bring))
    ready_at = time.monotonic()

    def pause(size: int) -> None:
        """After each piece: the keeper takes a link without any bytes for a broken one."""
        nonlocal ready_at
        if rate:
            ready_at = max(time.monotonic(), ready_at) + size / rate
        if over is not None and over.wait(max(0.0, ready_at - time.monotonic())):
            raise LinkError("the snapshot is no longer needed")

    piece = min(frames.PIECE, max(1, int(rate * PAUSE_S))) if rate else frames.PIECE
    for envelope, body in copy.entries:
        frames.send(link, envelope, body, piece=piece, sent=pause)


def receive_copy(link: Link, bring: Bring) -> StateCopy | None:
    """Receive the copy that ``bring`` announces; ``None`` if other bytes arrived than were sent.

    Raises:
        LinkError: the other side is gone.
    """
    entries = tuple(frames.receive_whole(link) for _ in range(bring.units + 1))
    if digest_of_bodies(entries) != bring.digest:
        return None
    return StateCopy(bring.rank, bring.step, bring.layouts, entries, bring.digest)
