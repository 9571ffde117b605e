"""The shadow of a rank that a planned move gives to this worker, up to the vote of the switch.

If the source sends no outputs the shadow computes no step: it follows the tails, and is in step
once its digest equals the source's after one. At the switch the leaver compares the state.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from tmd.trainer.protocol.frames import (
    Begin,
    Boundary,
    GradientsOnly,
    HandOver,
    Tail,
)
from tmd.trainer.shadow.comparison import DigestComparison
from tmd.trainer.shadow.receiver import Arrival, CopyInstead
from tmd.trainer.shadow.session import ShadowSession
from tmd.trainer.shadow.stage import ShadowPlace, ShadowStage
from tmd.trainer.state.data import Feed

log = logging.getLogger("tmd.trainer")


class PlannedSession(ShadowSession):
    """Used by the main thread only, except the inherited ``give_way`` (any thread)."""

    _misled = CopyInstead

    _first_tail: int | None = None
    """The first step whose tail was applied to the whole state."""

    @property
    def has_switched(self) -> bool:
        """Whether the vote has given this worker the rank, and it can assume it here."""
        return self._stage is ShadowStage.WON and not self.shadow.starved

    def computed(self, step: int) -> None:
        """As :meth:`ShadowSession.computed`; a source in a switch waits for the news."""
        super().computed(step)
        self._report_step()

    def voted(self, agreed: int, *, trained: bool) -> None:
        """As :meth:`ShadowSession.voted`; with the ticket of this move the rank is won."""
        super().voted(agreed, trained=trained)
        if agreed != 0 and agreed == self._ticket:
            self._stage = ShadowStage.WON

    @property
    def _shown(self) -> bool:
        """Whether a step of its own gave the same bits, or a tail if it computes none."""
        if not self.follows_tails:
            return super()._shown
        first, verified = self._first_tail, self._digests.verified
        return first is not None and verified is not None and first < verified

    def _take_in(self, arrival: Arrival, feed: Feed) -> None:
        match arrival.frame:
            case GradientsOnly(why=why):
                self._follow_tails(why)
            case HandOver(step=step):
                if step == self._at and self._place is ShadowPlace.WAITING:
                    self._stage = ShadowStage.WON
            case _:
                super()._take_in(arrival, feed)

    def _stand(self, frame: Boundary, tensors: Sequence[Tensor], feed: Feed) -> None:
        super()._stand(frame, tensors, feed)
        if self.follows_tails:
            # Before the digest, since a switch may wait.
            self._report_step()

    def _follow(self, tail: Tail, tensors: Sequence[Tensor]) -> None:
        super()._follow(tail, tensors)
        if self._first_tail is None and not self._copied.missing:
            self._first_tail = tail.step

    def _follow_tails(self, why: str) -> None:
        """Compute no step from here on."""
        self.follows_tails = True
        self.note = f"by gradients only, since {why}"
        log.info("rank %d is followed %s", self.directive.plays, self.note)

    def _report_step(self) -> None:
        """Tell the source that the state at the start of this step is here."""
        if self._stage is ShadowStage.SETTLED:
            self._say_settled()

    def _copy_whole(self, where: str) -> None:
        """Copy the whole state while the source waits, since the tail led to another state.

        Raises:
            CopyInstead: the copy would be old after the next step, whose outputs do not come.
        """
        if self.follows_tails:
            after = f" after equal ones since step {self._first_tail}" if self._shown else ""
            raise CopyInstead(f"{self.note}, but they lead to another state{after}: {where} differ")
        self.note = f"training waited for a whole copy, since the tail was wrong: {where} differ"
        log.warning("rank %d: %s", self.directive.plays, self.note)
        self._stage = ShadowStage.OWN_STEPS
        self._copied.begin()
        self._at = None
        self._digests = DigestComparison()
        self.shadow.send(Begin(whole=True))
