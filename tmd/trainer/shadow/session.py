"""One attempt to shadow a rank: copy its state, replay its optimizer steps, then compute each step.

At each step boundary the shadow waits until the source announces that the step begins. A shadow
that is behind may jump: the *tail* of a step (its final gradients) leads to a boundary that has
already passed. A shadow is in step once its digest equals the source's after a step of its own, and
its lag is negligible.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from tmd.core.planning.directives import Directive, HoldState, Prepare, ShadowRank
from tmd.core.values.errors import LinkError, TmdError
from tmd.core.values.limits import ShadowLimits
from tmd.core.values.model import ShadowStatus
from tmd.fabric import Fabric
from tmd.trainer.protocol.frames import (
    CHECK_EVERY,
    Begin,
    Boundary,
    DigestCheck,
    Settled,
    Tail,
    Took,
    Unit,
)
from tmd.trainer.protocol.offers import Offer
from tmd.trainer.protocol.step_vote import ticket
from tmd.trainer.shadow.comparison import DigestComparison
from tmd.trainer.shadow.copied_state import CopiedState
from tmd.trainer.shadow.lag import Lag
from tmd.trainer.shadow.receiver import Arrival, Differs, Overdue, ShadowReceiver
from tmd.trainer.shadow.stage import ShadowPlace, ShadowStage
from tmd.trainer.state.data import Feed
from tmd.trainer.state.units import OTHERS, Units, whole_digest
from tmd.trainer.state_transfer.obstacle import NextLoop

FEW_STEPS = 20
"""Number of the source's steps that a shadow may always take to get in step."""
REPLACEABLE_S, LAST_COPY_S = 0.02, 0.25
"""Quiet time after which a dead rank's output is considered complete: if a replica has the same
state, or if there is none (TCP retransmits after 0.2 s)."""

log = logging.getLogger("tmd.trainer")


class ShadowSession:
    """Main thread or :class:`Continuation`, except :meth:`give_way`."""

    _misled: type[LinkError] = Overdue
    """The error if a tail has led to another state, from which this worker has computed a step."""

    def __init__(
        self,
        directive: Prepare | ShadowRank,
        shadow: ShadowReceiver,
        offer: Offer,
        units: Units,
        fabric: Fabric,
        limits: ShadowLimits,
    ) -> None:
        self.directive = directive
        self.shadow = shadow
        if isinstance(directive, Prepare):
            self._size, self._ticket = directive.membership.size, ticket(directive.membership)
        else:
            self._size, self._ticket = directive.size, 0
        self._call = offer.position.call
        self._units = units
        self._fabric = fabric
        self._limits = limits
        self._copied = CopiedState(units)
        self._at: int | None = None
        """The step at whose start this worker's state is."""
        self._announced = -1
        """The newest step that the source has announced."""
        self._due = ""
        """Name of the repeatable function that the rank runs in the announced step, if any."""
        self._since = 0
        """The first step that this worker computed itself."""
        self._first_own: int | None = None
        """The first of these that trained: the end of a ``batches()`` call proves nothing."""
        self._stage, self._place = ShadowStage.ASKED, ShadowPlace.WAITING
        self._digests = DigestComparison()
        self._refuted: TmdError | None = None
        self.lag = Lag(limits.lag)
        self._started, self._positioned_at = time.monotonic(), 0.0
        self.exists_once = False
        """Whether the rank's state has no replica."""
        self.stands_in = False
        """Whether this worker has committed the step of a lost rank, which it takes next."""
        self.follows_tails = False
        """Whether this worker computes no step. The leaver compares its state after the vote."""
        self.note = ""
        """Unusual events, for the operator."""

    # --- properties -------------------------------------------------------------------------------

    @property
    def may_run(self) -> bool:
        """Whether the current step can be computed."""
        return self._place is ShadowPlace.READY and not self.spoilt

    @property
    def spoilt(self) -> bool:
        """Whether the current step lacks outputs."""
        return self.shadow.starved

    @property
    def step(self) -> int:
        return self._at or 0

    @property
    def has_state(self) -> bool:
        """Whether the rank's state at the start of :attr:`step` is here, as far as known."""
        recent = self.step - (self._digests.verified or 0) <= 2 * CHECK_EVERY
        return recent and self._proved and self._place is not ShadowPlace.BETWEEN

    @property
    def _proved(self) -> bool:
        """Whether this state was verified, or follows from a verified one by own steps only."""
        verified = self._digests.verified
        return verified is not None and verified >= self._since

    @property
    def has_switched(self) -> bool:
        """Whether the vote has given this worker the rank, and it can assume it here."""
        return False

    @property
    def in_step(self) -> bool:
        """Whether a step of its own gave the same bits, with negligible lag."""
        return self._shown and self.lag.unnoticed

    @property
    def _shown(self) -> bool:
        """Whether a step of its own gave the same bits."""
        first, verified = self._first_own, self._digests.verified
        return first is not None and verified is not None and self._since <= first < verified

    @property
    def overdue(self) -> bool:
        """Whether its time to get in step is over, not counting the evaluations of the rank."""
        since, now = self._positioned_at, time.monotonic()
        # With long steps the number of steps matters.
        patience = max(self._limits.patience_s, FEW_STEPS * self.lag.pace_s(now))
        patience += self.shadow.evaluations.seconds(now)
        settled = self._stage >= ShadowStage.SETTLED
        return since > 0 and not settled and now - since > patience

    @property
    def keeps_shadowing(self) -> bool:
        """Whether it shadows without an end, as a hot standby."""
        return isinstance(self.directive, ShadowRank) and self.directive.stay

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def status(self) -> ShadowStatus:
        return ShadowStatus(
            rank=self.directive.plays,
            copied=self._copied.share,
            lag_s=self.lag.seconds,
            verified=self._digests.verified,
            note=self.note,
        )

    # --- at a boundary, and after a step ----------------------------------------------------------

    def go_on(self, feed: Feed, tell: Callable[[], None] = lambda: None) -> NextLoop | None:
        """Come to where the next step can be computed; waits for the source.

        ``tell`` is called as the state arrives. Returns what must come first, if anything.

        Raises:
            LinkError: the source has ended the shadow or is gone, or its state cannot be reached.
            Differs: this worker computes other bits.
            Overdue: this worker cannot get in step, or a tail led to another state.
        """
        if how := self.shadow.mismatch:
            self._check_tail(how)
            raise Differs(self.directive.plays, how)
        if self.spoilt:
            raise self.shadow.lost
        if self._call > feed.call:
            return NextLoop()
        if self._stage is ShadowStage.ASKED:
            self.shadow.send(Begin())
            self._stage = ShadowStage.JUMPING
        while not self._may_begin():
            if self.overdue:
                raise Overdue(f"not in step with rank {self.directive.plays} in time")
            arrival = self.shadow.next_state()
            self._take_in(arrival, feed)
            if self._call > feed.call:
                return NextLoop()
            if isinstance(arrival.frame, Unit):
                tell()
            if self.follows_tails:
                return None
        self._place = ShadowPlace.READY
        return None

    def computed(self, step: int) -> None:
        """Note a computed step: the state is that at the start of ``step`` now."""
        self._at = step
        self._place = ShadowPlace.WAITING

    def check_again(self) -> None:
        """Compare the digests that have arrived, before this worker assumes the rank.

        Raises:
            Differs: this worker computes other bits.
            LinkError: registered objects differ.
        """
        for step, parts in self.shadow.checks():
            self._check(self._digests.theirs(step, parts), step)

    def refutation(self) -> TmdError | None:
        """The rank is lost: compare the last digests that it sent. Returns why its state is not
        here; ``None`` if nothing is known against it."""
        try:
            self.check_again()
        except TmdError as error:
            self._refuted = error
        return self._refuted

    def voted(self, agreed: int, *, trained: bool) -> None:
        """A step of its own is committed, with the ticket of a switch, or 0 for none.

        ``trained``: whether an optimizer ran in it. An evaluation proves nothing.
        """
        if trained and (self._first_own is None or self._first_own < self._since):
            self._first_own = self._at

    def settle(self) -> None:
        """Note that it is in step: it needs few digests, and no more tails if it gets outputs."""
        self._stage = max(self._stage, ShadowStage.SETTLED)
        self._say_settled()

    def _say_settled(self) -> None:
        with contextlib.suppress(LinkError):  # a broken link shows at the next frame, too
            self.shadow.send(Settled(self.step))

    def jumps_no_more(self) -> None:
        """Compute every step here from now on."""
        self._stage = ShadowStage.OWN_STEPS

    def give_way(self, directive: Directive) -> None:
        """End the shadow for another directive (any thread)."""
        match directive:
            case HoldState(over=False):
                pass  # outputs that still arrive are needed in a recovery
            case HoldState():
                self.shadow.hear_out(LAST_COPY_S if self.exists_once else REPLACEABLE_S)
            case _:
                self.shadow.close()

    def take(self) -> None:
        """Tell the source that it is no longer needed."""
        try:
            self.shadow.send(Took(self.step))
        except LinkError as error:
            log.info("the source left before it was released: %s", error)

    # --- frames -----------------------------------------------------------------------------------

    def _may_begin(self) -> bool:
        """Whether the current step can be computed now.

        The copy must be verified: then a later difference comes from a tail or from a step of this
        worker. After a tail the parameters are those of the next step already.
        """
        if self.follows_tails:
            return False
        began = self._at is not None and self._announced == self._at
        stands = self._place is not ShadowPlace.BETWEEN
        return began and stands and self._digests.verified is not None and not self._may_jump()

    def _take_in(self, arrival: Arrival, feed: Feed) -> None:
        """Use one frame."""
        frame, tensors, at = arrival
        match frame:
            case Unit():
                self._copied.place(frame, tensors)
            case Tail():
                if self._at is None or frame.step >= self._at:
                    self._follow(frame, tensors)
            case DigestCheck():
                self._check(self._digests.theirs(frame.step, frame.parts), frame.step)
            case Boundary() if not self._copied.missing:
                if frame.position.call > feed.call:
                    self._call = frame.position.call
                    self.shadow.put_back(arrival)
                    return
                self.lag.boundary(at)
                if self._jumps and self.shadow.newest_boundary() is not None:
                    # The step has already passed: the tails lead to a later one.
                    return
                if self._at != frame.step and not frame.quiet:
                    # Outputs still to come would be taken for those of this step.
                    return
                self._stand(frame, tensors, feed)
                self._announced = frame.step
                self.lag.seconds = max(0.0, time.monotonic() - at)
                if frame.check:
                    own = whole_digest(self._units, frame.step)
                    self._check(self._digests.ours(frame.step, own), frame.step)
            case _:
                pass

    def _may_jump(self) -> bool:
        newest = self.shadow.newest_boundary()
        return self._jumps and newest is not None and newest > self.step

    @property
    def _jumps(self) -> bool:
        """Whether the source still sends tails, which lead over steps that have passed."""
        return self.follows_tails or self._stage is ShadowStage.JUMPING

    def _stand(self, frame: Boundary, tensors: Sequence[Tensor], feed: Feed) -> None:
        self._due = frame.position.due
        if self._at == frame.step:
            if feed.due != self._due:
                here, there = feed.due or "a step", self._due or "a step"
                why = f"this script runs {here}, that of the rank {there}"
                raise Overdue(f"{why}: a shadow must call all repeatable functions")
            return
        if frame.rest is None:
            raise LinkError(f"step {self._at} here, step {frame.step} there, and no tail to jump")
        first = self._at is None
        self._fabric.sandbox(self.shadow, self.directive.plays, self._size)
        self._positioned_at = self._positioned_at or time.monotonic()
        self._units.place_rest(frame.rest, tensors)
        self._units.grade(frame.graded)
        self._at = self._since = frame.step
        self._place = ShadowPlace.WAITING
        self.shadow.forget_before(frame.step)
        if first:
            feed.seek(frame.position)
        else:
            feed.skip_to(frame.position)

    def _follow(self, tail: Tail, tensors: Sequence[Tensor]) -> None:
        self._place = ShadowPlace.BETWEEN
        self._copied.follow(tail, tensors)

    # --- digests ----------------------------------------------------------------------------------

    def _check_tail(self, how: str) -> None:
        """This worker's own step differs from that of the rank in ``how``: find out whether it
        began in the state of the rank, if it can be found out.

        Raises:
            LinkError: it did not, so that a tail is to blame; or the source is gone.
        """
        # None is taken in an evaluation, nor in a step that is shorter than the digest takes.
        while not self._proved and self._digests.awaits(self._since) and not self._due:
            match self.shadow.next_state().frame:
                case DigestCheck(step=step, parts=parts) if step == self._since:
                    if differing := self._digests.theirs(step, parts):
                        where = f"{' and '.join(differing)} differ at the start of step {step}"
                        raise self._misled(f"the tail was wrong: {where}; then {how}")
                case DigestCheck(step=step) | Boundary(step=step) if step > self._since + 1:
                    return
                case _:
                    pass

    def _check(self, differing: list[str], step: int) -> None:
        """Handle the parts of the state that differ at the start of ``step``, if any."""
        if not differing:
            return
        where = f"{' and '.join(differing)} at the start of step {step}"
        if (first := self._digests.first_unit) is not None:
            where += f" (first of all {self._units.name(first)})"
        if not self._proved and self._jumps:
            self._copy_whole(where)
            return
        self._digests.refute()
        if differing == [OTHERS]:
            why = f"registered objects differ after a step of this worker's own: {where}"
            # For a move the state may still be copied; a hot standby would only fail again.
            raise Overdue(why) if isinstance(self.directive, ShadowRank) else LinkError(why)
        raise Differs(self.directive.plays, f"{where} differ")

    def _copy_whole(self, where: str) -> None:
        """Give up, since the tail led to another state: training does not wait for a whole copy.

        Raises:
            Overdue: always.
        """
        raise Overdue(f"the tail is wrong: {where} differ")
