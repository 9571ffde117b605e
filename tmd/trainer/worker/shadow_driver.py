"""Drives a shadow, for a move or as a hot standby, and reports its progress.

:mod:`tmd.trainer.shadow.session` shadows the rank. This module decides when, what this worker
reports meanwhile, and what it does when the source ends the shadow.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from tmd.core.planning.directives import (
    Directive,
    HoldState,
    Prepare,
    ShadowRank,
    is_rehearsal,
)
from tmd.core.values.errors import LinkError, StateMismatch
from tmd.core.values.model import Activity, Rehearsal
from tmd.core.worker.transitions import WorkerTransition
from tmd.fabric import Link
from tmd.trainer.protocol import frames
from tmd.trainer.protocol.frames import Dropped
from tmd.trainer.protocol.offers import Offer
from tmd.trainer.shadow.planned import PlannedSession
from tmd.trainer.shadow.receiver import (
    CopyInstead,
    Differs,
    Overdue,
    ShadowLost,
    ShadowReceiver,
    ask,
)
from tmd.trainer.shadow.replay import ReplaySession
from tmd.trainer.shadow.session import ShadowSession
from tmd.trainer.state.divided import NOT_SHADOWED
from tmd.trainer.state.roles import Role
from tmd.trainer.state_transfer.context import RankContext
from tmd.trainer.state_transfer.obstacle import NextLoop, Rebuild
from tmd.trainer.worker.agent import Agent
from tmd.trainer.worker.attempts import Attempts
from tmd.trainer.worker.status_reporter import StatusReporter

RECALLS = 2
"""How often a joiner reconnects to its rank after a broken link, before it waits for a copy."""

log = logging.getLogger("tmd.trainer")


class AfterShadow(Enum):
    """A worker's next activity when its shadow has ended."""

    STAND_BY = auto()
    REFUSE = auto()
    AWAIT_STATE = auto()
    BECOME_RANK = auto()
    """It shadowed a replica and lacks only the rank's local state, or it followed gradients."""


class ShadowEnd(NamedTuple):
    """The end of a shadow. ``reason``: why the worker refuses, or needs a copy of the state."""

    then: AfterShadow
    reason: str = ""


class ShadowDriver:
    """Main thread or :class:`Continuation`, except :meth:`cancel_unless`, :meth:`digest_early`."""

    def __init__(self, reporter: StatusReporter, agent: Agent, context: RankContext) -> None:
        self._reporter = reporter
        self._agent = agent
        self._fabric = context.fabric
        self._state = context.state
        self._fit = context.fit
        self._units = context.units
        self._limits = context.limits
        self.following: ShadowSession | None = None
        """SHADOWING and IN_STEP: the current session. STANDBY: the one that has just ended."""
        self._recalls = 0
        """Remaining reconnections of the current move."""
        self.attempts = Attempts()

    @property
    def enabled(self) -> bool:
        """Whether ranks move by live shadow."""
        return self._limits.enabled

    @property
    def step(self) -> int:
        """The step at which this worker is, as a shadow or as a rank."""
        following = self.following
        return self._reporter.status.step if following is None else following.step

    def has_state_of(self, *ranks: int) -> int | None:
        """The step at whose start this worker has the state of one of ``ranks`` by shadowing;
        ``None`` if it has none of them."""
        following = self.following
        if following is None or not following.has_state or following.directive.plays not in ranks:
            return None
        return following.step

    def cancel_unless(self, directive: Directive) -> None:
        """End the shadow if ``directive`` is another one (any thread)."""
        following = self.following
        if following is None or directive == following.directive:
            return
        following.give_way(directive)
        self.digest_early(directive)

    def digest_early(self, directive: Directive | None) -> None:
        """Start the digest early if the shadowed rank was lost (any thread)."""
        lost, following = isinstance(directive, HoldState) and directive.over, self.following
        if lost and following is not None and following.has_state:
            self._state.early.begin()

    def begin(
        self,
        directive: Prepare | ShadowRank,
        link: Link,
        offer: Offer,
        timings: dict[str, float],
        recalls: int = RECALLS,
    ) -> None:
        """Shadow the rank of ``directive`` from its next step."""
        self._recalls = recalls
        self._state.early.forget()
        # The whole recording of a rehearsal waits here while the rank trains on.
        bound = frames.staging_bound(self._limits, self._units) * (1 + is_rehearsal(directive))
        around = (ShadowReceiver(link, bound), offer, self._units, self._fabric, self._limits)
        following: ShadowSession
        if isinstance(directive, Prepare):
            following = PlannedSession(directive, *around)
        else:
            kind = ReplaySession if is_rehearsal(directive) else ShadowSession
            following = kind(directive, *around)
        following.exists_once = len(self._reporter.alike(directive.plays)) < 2
        self.following = following
        self._fit.learn(offer)
        plan = directive.plan if isinstance(directive, Prepare) else ""
        self._reporter.update(
            WorkerTransition.SHADOWED, plan=plan, timings=timings, shadow=following.status()
        )
        if (present := self._agent.directive) is not None:
            # The directive may have changed before there was anything to cancel.
            self.cancel_unless(present)

    def follow(self) -> ShadowEnd | NextLoop | None:
        """At the joiner's step boundary: reach the point where the next step can be computed.

        Returns an obstacle or the end of the shadow, if any.
        """
        following, feed = self.following, self._state.feed
        assert following is not None
        assert feed is not None
        try:
            if following.has_switched:
                following.check_again()
                return self._take(following)
            needed = following.go_on(
                feed, lambda: self._reporter.update(shadow=following.status(), now=False)
            )
            if needed is None and not following.has_switched:
                return self._tell(following)
        except StateMismatch as error:
            return self._unfit(following, error)
        except LinkError as error:
            return self._lost(following, error)
        # Between two batches() calls a script may print or save. Until the next call the session
        # reports a shadow, with a rank other than 0 if possible.
        self._fit.rest()
        return needed

    def _tell(self, following: ShadowSession) -> ShadowEnd | None:
        activity = self._reporter.status.activity
        if activity is Activity.SHADOWING and following.in_step:
            return self._in_step(following)
        if activity is Activity.IN_STEP and following.lag.late:
            self._reporter.update(
                WorkerTransition.FELL_BEHIND,
                shadow=following.status(),
                timings=self._reporter.status.timings,
            )
        else:
            self._reporter.update(step=following.step, shadow=following.status(), now=False)
        return None

    def _in_step(self, following: ShadowSession) -> ShadowEnd | None:
        directive = following.directive
        if is_rehearsal(directive):
            return self._rehearsed(following, directive)
        following.settle()
        # From here on the leader may order the switch. A new link could miss that vote.
        self._recalls = 0
        self.attempts.caught_up()
        self._reporter.update(
            WorkerTransition.CAUGHT_UP,
            step=following.step,
            shadow=following.status(),
            timings=self._reporter.status.timings,
        )
        return None

    def _unfit(self, following: ShadowSession, error: StateMismatch) -> ShadowEnd:
        """This worker cannot assume the rank; if it computed other bits, it cannot assume any.

        The verdict outlives the move, until a rehearsal disproves it.
        """
        directive, differs = following.directive, isinstance(error, Differs)
        if isinstance(directive, ShadowRank):
            return self._rehearsed(following, directive, refusal=str(error), suspect=differs)
        found = (following.step, following.seconds, str(error))
        verdict = Rehearsal(*found, suspect=differs, refused_rank=directive.plays)
        self._reporter.report_rehearsal(directive.plays, verdict)
        self.end()
        return ShadowEnd(AfterShadow.REFUSE, str(error))

    def _rehearsed(
        self,
        following: ShadowSession,
        directive: ShadowRank,
        *,
        refusal: str = "",
        note: str = "",
        suspect: bool = False,
    ) -> ShadowEnd:
        verdict = Rehearsal(
            *(following.step, following.seconds, refusal, note, directive.request), suspect=suspect
        )
        self._found(directive, verdict)
        return ShadowEnd(AfterShadow.STAND_BY)

    def _lost(self, following: ShadowSession, error: LinkError) -> ShadowEnd | None:
        """The shadow has ended: use its state if possible."""
        directive = following.directive
        hopeless = isinstance(error, Overdue) or (isinstance(error, ShadowLost) and error.final)
        if isinstance(directive, ShadowRank):
            if hopeless:
                # A slow standby is fit for a rank, but is not tried again.
                return self._rehearsed(following, directive, note=str(error))
            return self._stand_by_with_state(following, error)
        if hopeless:
            # A slow standby is fit: only this move is refused.
            self.end()
            return ShadowEnd(AfterShadow.REFUSE, self._lateness(following, error))
        if self._agent.directive != directive:
            self._fabric.discard(directive.membership)
            return ShadowEnd(AfterShadow.STAND_BY)
        if not isinstance(error, CopyInstead) and self._reconnected(directive, error):
            return None
        # Still wanted: the state is copied at the switch.
        self.end()
        log.warning("plan %s: the shadow was ended: %s", directive.plan, error)
        return ShadowEnd(AfterShadow.AWAIT_STATE, str(error))

    def _reconnected(self, directive: Prepare, error: LinkError) -> bool:
        """Start again over another link, unless a rank may already be ordered to switch."""
        if self._reporter.status.activity is not Activity.SHADOWING or not self._recalls:
            return False
        timings, recalls = self._reporter.status.timings, self._recalls - 1
        self.end()
        try:
            link, answer = ask(self._fabric, directive)
        except LinkError:
            return False
        if isinstance(answer, Dropped):
            link.close()
            return False
        log.warning("plan %s: the link broke, shadowing again: %s", directive.plan, error)
        self.begin(directive, link, answer.offer, timings, recalls)
        return True

    def _lateness(self, following: ShadowSession, error: LinkError) -> str:
        lag = following.lag
        return f"{error}: {lag.seconds:.3f} s behind at steps of {lag.step_s:.3f} s"

    def _take(self, following: ShadowSession) -> ShadowEnd | None:
        """The vote has given this worker the rank, and it has the state."""
        directive, status = following.directive, following.status()
        assert isinstance(directive, Prepare)
        other = directive.plays != directive.rank
        if following.follows_tails or (other and not directive.adopted):
            return ShadowEnd(AfterShadow.BECOME_RANK)
        following.take()
        self.following = None
        self._fabric.switch(directive.membership, directive.rank)
        self._reporter.update(
            WorkerTransition.TOOK_OVER,
            rank=directive.rank,
            epoch=directive.membership.epoch,
            shadow=None,
            timings={**self._reporter.status.timings, "transfer": 0.0, "lag": status.lag_s},
        )
        if other:
            # It has computed the batches of the source's rank.
            self._state.draw_anew()
        return None

    def attempt(self, directive: ShadowRank) -> Rebuild | None:
        """Begin to shadow a rank, or return the rebuild that must come first."""
        self.attempts.begin()
        try:
            link, answer = ask(self._fabric, directive)
        except LinkError as error:
            log.info("rank %d cannot be shadowed now: %s", directive.rank, error)
            return None
        if isinstance(answer, Dropped):
            link.close()
            if self._units.divided and answer.offer is not None:
                self.not_tried(directive, note=NOT_SHADOWED, roles=answer.offer.roles)
            # Otherwise the source is in a recovery, which may need the state shadowed so far.
            return None
        self.end()
        refusal = self._fit.refusal(directive.rank, answer.offer)
        if not refusal:
            self.begin(directive, link, answer.offer, {})
            return None
        link.close()
        if isinstance(refusal, Rebuild):
            self.attempts.repeat()
            return refusal
        self.not_tried(directive, refusal=refusal, roles=answer.offer.roles)
        return None

    def not_tried(
        self,
        directive: ShadowRank,
        *,
        refusal: str = "",
        note: str = "",
        roles: Sequence[Role] = (),
    ) -> None:
        """Report why no step was rehearsed. ``roles``: those of all ranks, if just received."""
        verdict = Rehearsal(0, 0.0, refusal, note, directive.request)
        self._found(directive, verdict, roles)
        self._reporter.update(shadow=None)

    def _found(self, directive: ShadowRank, verdict: Rehearsal, roles: Sequence[Role] = ()) -> None:
        if verdict.refusal:
            log.error("this standby gets no rank until a rehearsal succeeds: %s", verdict.refusal)
        else:
            log.info("rehearsed rank %d: %s", directive.plays, verdict.note or "same bits")
        self._reporter.report_rehearsal(directive.plays, verdict, roles)
        self.attempts.settle(directive)

    def _stand_by_with_state(self, following: ShadowSession, error: LinkError) -> ShadowEnd | None:
        """Keep the state for a possible recovery."""
        log.info("rank %d: the shadow has ended: %s", following.directive.plays, error)
        following.shadow.close()
        self._fit.rest()
        refuted = following.refutation() if following.keeps_shadowing else None
        if isinstance(refuted, StateMismatch):
            return self._unfit(following, refuted)
        if not (following.has_state and following.keeps_shadowing):
            return ShadowEnd(AfterShadow.STAND_BY)
        self.report_standing_by(following, undecided=False)
        return None

    def report_standing_by(self, following: ShadowSession, *, undecided: bool) -> None:
        """Report that the shadow has ended and its state is here."""
        self._state.early.stand(following.step)
        self._state.early.begin()
        self._reporter.update(
            WorkerTransition.LEFT_ALONE,
            step=following.step,
            shadow=following.status(),
            undecided=undecided,
        )

    def take_place(self) -> None:
        """This worker becomes the rank that it followed, in the middle of a step."""
        assert self.following is not None
        self.following.shadow.close()
        self.following = None

    def end(self) -> None:
        """End the shadow and drop its session."""
        if self.following is not None:
            self.following.shadow.close()
            self.following = None
            self._fit.rest()

    def close(self) -> None:
        """Wait for a limited time for the reader's thread, since the process ends."""
        if self.following is not None:
            self.following.shadow.end()

    def disown_state(self) -> None:
        """Report that this worker, which is about to be rebuilt, has no rank's state."""
        if self.following is not None:
            self.end()
            self._reporter.update(shadow=None)
