"""Sends the state of this rank, then the output of every collective, to a joiner.

The state is copied unit by unit while it does not change. Later changes to copied units follow as
the *tail* (gradients as the optimizer got them). From the first step boundary at which everything
is copied the joiner also gets all outputs and runs the steps itself. If the outputs exceed what the
link carries, a joiner of a planned move gets only the tails until the switch.
Rule of this file: training never waits for a joiner, except where a joiner requests it (``whole``).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from tmd.core.values.errors import LinkError
from tmd.core.values.reasons import in_words
from tmd.fabric import Link
from tmd.trainer.protocol import frames
from tmd.trainer.protocol.frames import (
    Begin,
    Boundary,
    ControlMessage,
    DigestCheck,
    Dropped,
    Frame,
    Output,
)
from tmd.trainer.protocol.outbox import Outbox
from tmd.trainer.shadow.output_load import LinkRate
from tmd.trainer.shadow.source_context import SourceContext, SourcePace, SourceStage
from tmd.trainer.shadow.unit_copy import UnitCopy
from tmd.trainer.state.data import Position
from tmd.trainer.state.dtensors import local_part
from tmd.trainer.state.layout import flatten
from tmd.trainer.state.units import UnitDigest, whole_digest

HOLD_S = 5.0
"""Longest time for which a switch waits for a joiner that was in step and is behind."""
NO_STEP = -1
"""Version of the window between two steps, which has no digest."""
ENDING_S = 2.0
TAKEN = "the rank was taken over"
HANDED_OVER = "the rest of the state follows"
BEHIND = "the joiner does not keep up: too many bytes wait for it"

log = logging.getLogger("tmd.trainer")


class ShadowSource:
    """One joiner that shadows this rank. Owns the link and two threads until it is over."""

    def __init__(
        self,
        link: Link,
        follow: frames.ShadowRequest,
        context: SourceContext,
        pace: SourcePace | None = None,
    ) -> None:
        units, limits = context.units, context.limits
        self._pace = pace or SourcePace()
        self.plan, self.joiner = follow.plan, link.peer
        self._link = link
        self._units = units
        self._window = context.window
        self._meter = context.meter
        self._load, self._link_rate = context.load, LinkRate()
        # These need all outputs: a hot standby, since it may have to finish a step, and the joiner
        # of an adopted rank, since nothing compares its state after the vote.
        self._needs_outputs = follow.adopted or not follow.plan
        self._copy = UnitCopy(units, limits.copy_mb_s * 1e6, self._pace.clock)
        self._outbox = Outbox(frames.staging_bound(limits, units))
        self._stage = SourceStage.OPENED
        self._staging = threading.Lock()
        self._begin: Begin | None = None
        self._settled = self.proves_sums = False
        self._reached = 0
        """The step at whose start the joiner is, once it is in step; 0 if it does not say."""
        self._held_at: float | None = None
        """When a switch first waited for the joiner."""
        self._tails = True
        """Whether tails are sent: the joiner may have to skip steps by them."""
        self._digest: UnitDigest | None = None
        self._owes_check = False
        """Whether the digest of the step before could not be completed."""
        self._last_words: Dropped | None = None
        self._taken = threading.Event()
        self._threads = [
            threading.Thread(target=act, name=f"tmd-mirror-{role}", daemon=True)
            for role, act in (("out", self._send_all), ("in", self._listen))
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:
            self.drop("no thread can be started")  # else the first one would wait for good
            raise

    @property
    def over(self) -> bool:
        return self._stage is SourceStage.OVER

    @property
    def copies(self) -> bool:
        """Whether the state is being copied."""
        return self._stage is SourceStage.COPYING

    @property
    def live(self) -> bool:
        """Whether the joiner gets all outputs."""
        return self._stage is SourceStage.LIVE

    @property
    def is_followed(self) -> bool:
        """Whether the joiner follows each step, by its outputs or by its tails."""
        return self._stage in (SourceStage.LIVE, SourceStage.TAILS)

    # --- main thread ------------------------------------------------------------------------------

    def at_boundary(self, step: int, position: Position, *, quiet: bool) -> None:
        """``step`` begins. ``quiet``: no operation of an earlier step is running."""
        begin = self._begin
        if begin is not None and (quiet or not begin.whole):
            self._begin = None
            self._enter(SourceStage.COPYING)
            self._copy.begin()
            self._settled, self._reached = False, 0
            self._tails = not begin.whole
            if begin.whole:
                self._wait_for_whole_copy()
        # An output of an earlier step must not be taken for one of this step.
        arrives = quiet and self.copies and self._copy.complete
        with self._harmless():
            if arrives:
                self._arrive()
            if self.is_followed:
                self._announce(step, position, quiet, arrives, tails=self._tails)

    def before_optimizer(self, step: int, number: int) -> None:
        """Send the final gradients of the units that the joiner already has."""
        if not self._tails or not (self.copies or self.is_followed):
            return
        params = self._units.params
        given = [
            i
            for i in self._units.of(number)
            if i < self._copy.count and (g := params[i].grad) is not None and not g.is_sparse
        ]
        with self._harmless():
            layout, values = flatten(self._units.values(number))
            grads = [local_part(g) for i in given if (g := params[i].grad) is not None]
            self._put(frames.Tail(step, number, tuple(given), layout), [*grads, *values])

    def evaluates(self) -> None:
        """No digest of this step can be completed: the next one makes up for it."""
        self._owes_check = self._digest is not None

    def send_result(self, channel: str, payload: bytes) -> None:
        """Send the result of a vote or a shift."""
        if self._stage is SourceStage.LIVE:
            self._put(ControlMessage(channel, payload))

    def wait_until_taken(self, cancelled: Callable[[], bool]) -> bool:
        """After the switch: whether the joiner has assumed the rank from its shadow."""
        while not self.over and not cancelled():
            if self._taken.wait(self._pace.idle_s):
                self.drop(TAKEN)
                return True
        self.drop("the rank was not taken over")
        return self._taken.is_set()

    def release(self) -> None:
        """After a switch that gave the joiner another rank. This rank goes on. The joiner needs the
        rest of its last step, and no more."""
        self._enter(SourceStage.RELEASED)
        if self._taken.is_set():
            self.drop(TAKEN)

    def hand_over(self, step: int, position: Position) -> None:
        """After a switch: a joiner that follows the tails gets what has changed up to the start of
        ``step``, and learns that the vote has given it the rank."""
        if self._stage is not SourceStage.TAILS:
            return
        with self._harmless():
            layout, tensors = self._units.rest(moving=True)
            last = Boundary(step, position, layout, self._units.graded)
            # Without room for it the joiner gets the whole state.
            if self._outbox.put(last, tensors):
                self._outbox.put(frames.HandOver(step))
        self.drop(HANDED_OVER)

    def holds(self, step: int) -> bool:
        """Whether a switch at the end of ``step`` should wait: the joiner was in step, but has not
        finished the step before, and all ranks would wait for it afterwards.

        The wait ends :data:`HOLD_S` after it began, since a joiner may stay behind for good.
        """
        if not 0 < self._reached < step:
            return False
        now = self._pace.clock()
        if self._held_at is None:
            self._held_at = now
            log.info("plan %s waits up to %g s for a joiner that is behind", self.plan, HOLD_S)
        return now - self._held_at < HOLD_S

    # --- any thread -------------------------------------------------------------------------------

    @property
    def needs_proof(self) -> bool:
        """Whether the joiner still has to prove that it computes the same bits."""
        return self._stage is SourceStage.LIVE and not self._settled

    def output(self, channel: str, op: str, outputs: Sequence[Tensor], given: str = "") -> None:
        """Send a collective's outputs. ``given``: digest of this rank's inputs, or empty."""
        if self._stage is SourceStage.LIVE:
            with self._harmless():
                self._put(Output(channel, op, given), outputs)

    def drop(self, reason: str, *, final: bool = False, queued: bool = True) -> None:
        """End the shadow and send the reason, if the joiner still listens.

        ``queued``: frames that wait are still sent, since a hot standby may use them; not with
        ``final`` (joiner or state is unfit).
        """
        with self._staging:
            if self._stage is SourceStage.OVER:
                return
            self._last_words = Dropped(reason, final)
            self._stage = SourceStage.OVER
        if final or not queued:
            self._outbox.forget()
        self.wake()

    def close(self) -> None:
        """Drop the joiner and wait a while for the threads."""
        self.drop("the source has ended")
        self._link.close()
        for thread in self._threads:
            thread.join(ENDING_S)

    # --- inside -----------------------------------------------------------------------------------

    def _enter(self, stage: SourceStage) -> None:
        with self._staging:
            if self._stage is not SourceStage.OVER:
                self._stage = stage

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Keep errors of the shadow from training."""
        try:
            yield
        except Exception as error:
            log.warning("this rank can no longer be shadowed: %s", error)
            self.drop(f"this rank cannot be shadowed: {in_words(error)}")

    def _arrive(self) -> None:
        """Everything is copied: choose what the joiner gets from here on."""
        why = ""
        # A joiner asks for a whole copy if the tails have led it to another state.
        if self._tails and not self._needs_outputs:
            rate = self._link_rate.bytes_per_s
            why = self._load.excess(self.plan, self._units.gradient_bytes, rate)
        self._enter(SourceStage.TAILS if why else SourceStage.LIVE)
        if why:
            log.info("plan %s: only gradients are mirrored: %s", self.plan, why)
            self._put(frames.GradientsOnly(why))

    def _announce(
        self, step: int, position: Position, quiet: bool, arrives: bool, *, tails: bool
    ) -> None:
        # A joiner of a plan may get the rank at any vote, so each of its steps is compared before
        # it. A joiner that follows by tails is compared after the vote.
        each = not self._settled or (bool(self.plan) and self._stage is SourceStage.LIVE)
        # With DDP equal outputs hide that the joiner's gradients have come to differ.
        self.proves_sums = step % self._pace.check_every == 0 or self._owes_check
        self._owes_check = False
        check = each or self.proves_sums
        layout, tensors = self._units.rest(moving=True) if arrives or tails else (None, [])
        graded = self._units.graded if arrives or tails else ()
        self._put(Boundary(step, position, layout, graded, check, quiet), tensors)
        if arrives and not tails:
            # At once: after a whole copy the joiner waits for it, and so does training.
            self._put(DigestCheck(step, whole_digest(self._units, step)))
        elif check:
            self._digest = UnitDigest(self._units, step)

    def _put(self, frame: Frame, tensors: Sequence[Tensor] = ()) -> None:
        if self._outbox.put(frame, tensors):
            return
        # The joiner may connect again, and follow by tails.
        early = self._stage is SourceStage.LIVE and not (self._settled or self._needs_outputs)
        again = early and self._load.spares(self._units.gradient_bytes)
        if again:
            self._load.overflow(self.plan)
        self.drop(BEHIND, final=not again, queued=False)

    def _wait_for_whole_copy(self) -> None:
        """The parameters do not change, since this thread, their only writer, waits here."""
        self._window.open(NO_STEP)
        try:
            self.wake()
            if not self._copy.wait(self._pace.stalled_s, self._pace.idle_s, lambda: self.over):
                self.drop("the joiner does not take the state", final=True)
        finally:
            self._window.close()

    def wake(self) -> None:
        """Wake the sender's thread."""
        self._outbox.wake()

    def _send_all(self) -> None:
        """Sender's thread: send queued frames first, then units of the state."""
        try:
            over = False
            while self._sent_something() or not over:
                # Once more after the end, since a frame may have come just before it.
                over = self.over
        except LinkError as error:
            self.drop(str(error))
        except Exception as error:
            log.warning("this rank can no longer be shadowed: %s", error)
            self.drop(f"this rank cannot be shadowed: {in_words(error)}")
        finally:
            self._outbox.forget()
            if self._last_words is not None:
                with contextlib.suppress(LinkError):
                    frames.send(self._link, frames.Envelope(self._last_words))
            self._link.close()

    def _sent_something(self) -> bool:
        """Send a frame or a unit, or work on the digest, or wait for either."""
        with self._meter.running():
            entry = self._outbox.next() or self._unit()
            if entry is not None:
                began = time.monotonic()
                frames.send(self._link, *entry, sent=self._copy.moved)
                self._link_rate.sent(entry[1].numel(), time.monotonic() - began)
                self._outbox.back(entry[1])
            elif not self._advance_digest():
                self._outbox.wait(self._pace.idle_s)
        return entry is not None

    def _unit(self) -> tuple[frames.Envelope, Tensor] | None:
        """The next unit to send; ``None`` if there is none now."""
        if not (self.copies and self._copy.is_due(paced=self._tails)):
            return None
        with self._window.reading() as version:
            return None if version is None else self._next_unit(version)

    def _next_unit(self, version: int) -> tuple[frames.Envelope, Tensor] | None:
        number = self._copy.count
        layout, tensors = self._units.at_start(number)
        entry = self._outbox.copy(frames.Unit(version, number, layout), tensors)
        if entry is None:
            self.drop(BEHIND, final=True)
            return None
        # Within the window: the tail of this step must include a copied unit.
        self._copy.copied(entry[1].numel())
        return entry

    def _advance_digest(self) -> bool:
        """Add one unit to the digest of this step; returns whether there was one to add."""
        digest = self._digest
        if digest is None:
            return False
        with self._window.reading() as version:
            if version != digest.version:
                # Not begun yet, or too late for this step.
                return False
            digest.advance()
        if digest.complete:
            if self._digest is digest:
                self._digest = None
            self._put(DigestCheck(digest.version, digest.parts()))
        return True

    def _listen(self) -> None:
        """Listener's thread: handle the joiner's frames."""
        try:
            while not self.over:
                frame, _ = frames.receive(self._link)
                match frame:
                    case Begin():
                        self._begin = frame
                    case frames.Settled(step=step):
                        self._settled, self._reached = True, step
                        self._tails = self._stage is SourceStage.TAILS
                    case frames.Took():
                        self._taken.set()
                        if self._stage is SourceStage.RELEASED:
                            self.drop(TAKEN)
                    case _:
                        self.drop(f"unexpected {type(frame).__name__} from the joiner")
        except LinkError as error:
            self.drop(str(error))
