"""Drives a shadow, for a move or as a hot standby, and reports its progress.

How a rank is followed is the business of :mod:`tmd.trainer.shadow.session`; here is when, what this
worker says meanwhile, and what becomes of it when there is nothing to follow any more.
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
    Sync,
    is_rehearsal,
)
from tmd.core.values.errors import LinkError, StateMismatch
from tmd.core.values.model import Activity, Rehearsal
from tmd.core.worker.transitions import WorkerTransition
from tmd.fabric import Link
from tmd.trainer.protocol import frames
from tmd.trainer.protocol.frames import Dropped
from tmd.trainer.protocol.offers import Offer
from tmd.trainer.shadow.receiver import Differs, ShadowLost, ShadowReceiver, ask
from tmd.trainer.shadow.replay import ReplaySession
from tmd.trainer.shadow.session import Overdue, ShadowSession
from tmd.trainer.state.divided import UNFOLLOWED
from tmd.trainer.state.roles import Role
from tmd.trainer.state_transfer.context import RankContext
from tmd.trainer.state_transfer.hindrance import NextLoop, Rebuild
from tmd.trainer.worker.agent import Agent
from tmd.trainer.worker.attempts import Attempts
from tmd.trainer.worker.status_reporter import StatusReporter

RECALLS = 2
"""How often a joiner whose link to its rank broke calls again, until it waits for a copy."""
NEWS_S = 15.0
"""How long a hot standby whose vote never came waits for a plan: a new leader may be needed."""

log = logging.getLogger("tmd.trainer")


class Then(Enum):
    """What a worker does when its shadow has ended."""

    STAND_BY = auto()
    REFUSE = auto()
    AWAIT_STATE = auto()
    BECOME_RANK = auto()
    """It shadowed a replica of the rank and lacks only the rank's local state."""


class ShadowEnd(NamedTuple):
    """A shadow has ended. ``reason``: why the worker refuses, or has the whole state copied."""

    then: Then
    reason: str = ""


class ShadowDriver:
    """All calls come from the main thread, but for :meth:`cancel_unless` and :meth:`heed`."""

    def __init__(self, reporter: StatusReporter, agent: Agent, context: RankContext) -> None:
        self._reporter = reporter
        self._agent = agent
        self._fabric = context.fabric
        self._state = context.state
        self._fit = context.fit
        self._units = context.units
        self._limits = context.limits
        self.following: ShadowSession | None = None
        """SHADOWING and IN_STEP: the session under way. STANDBY: the one that has just ended."""
        self._recalls = 0
        """Calls after a broken link that are left for the present move."""
        self.attempts = Attempts()

    @property
    def enabled(self) -> bool:
        """Whether ranks move by live shadow."""
        return self._limits.enabled

    @property
    def has_state_of(self) -> int | None:
        """The step at whose start the shadowed state stands; ``None`` if there is no such state."""
        following = self.following
        return following.step if following is not None and following.has_state else None

    def has(self, rank: int, step: int) -> bool:
        """Whether the state at the start of ``step`` is here, of ``rank`` itself."""
        following = self.following
        return (
            following is not None
            and following.directive.plays == rank
            and self.has_state_of == step
        )

    def cancel_unless(self, directive: Directive) -> None:
        """Follow no more if ``directive`` is another one (any thread)."""
        following = self.following
        if following is None or directive == following.directive:
            return
        following.give_way(directive)
        self.heed(directive)

    def heed(self, directive: Directive | None) -> None:
        """Begin with the digest if the rank that is followed was lost (any thread)."""
        following = self.following
        lost = isinstance(directive, HoldState) and directive.over
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
        """Follow the rank of ``directive`` from its next step on."""
        self._recalls = recalls
        self._state.early.forget()
        bound = frames.staging_bound(self._limits, self._units)
        # What is recorded waits as a whole, and the rank goes on meanwhile.
        shadow = ShadowReceiver(link, 2 * bound if is_rehearsal(directive) else bound)
        kind = ReplaySession if is_rehearsal(directive) else ShadowSession
        following = kind(directive, shadow, offer, self._units, self._fabric, self._limits)
        following.exists_once = len(self._reporter.alike(directive.plays)) < 2
        self.following = following
        self._fit.learn(offer)
        plan = directive.plan if isinstance(directive, Prepare) else ""
        self._reporter.update(
            WorkerTransition.SHADOWED, plan=plan, timings=timings, shadow=following.status()
        )
        present = self._agent.directive
        if present is not None:
            # It may have changed before there was anything that could be cancelled.
            self.cancel_unless(present)

    def follow(self) -> ShadowEnd | NextLoop | None:
        """At a step boundary of the joiner: come to where the next step can be computed.

        Returns what must come first, or what comes after the shadow, if anything does.
        """
        following = self.following
        feed = self._state.feed
        assert following is not None
        assert feed is not None
        try:
            if following.has_switched:
                following.check_again()
                return self._take(following)
            needed = following.go_on(
                feed, lambda: self._reporter.update(shadow=following.status(), now=False)
            )
        except StateMismatch as error:
            return self._unfit(following, error)
        except LinkError as error:
            return self._lost(following, error)
        if needed is None:
            return self._tell(following)
        # Between two batches() calls a script may print or save, and the rank itself does so.
        # This standby reports another rank of equal state there, and that it is a shadow.
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
        # From here on the leader may order the switch: a new call could miss the vote.
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
        """This worker cannot be the rank; one that computed other bits cannot be any rank.

        The verdict outlives the move, until a rehearsal shows otherwise.
        """
        directive, suspect = following.directive, isinstance(error, Differs)
        if isinstance(directive, ShadowRank):
            return self._rehearsed(following, directive, refusal=str(error), suspect=suspect)
        found = (following.step, following.seconds, str(error))
        verdict = Rehearsal(*found, suspect=suspect, refused_rank=directive.plays)
        self._reporter.tell_rehearsed(directive.plays, verdict)
        self.end()
        return ShadowEnd(Then.REFUSE, str(error))

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
        return ShadowEnd(Then.STAND_BY)

    def _lost(self, following: ShadowSession, error: LinkError) -> ShadowEnd | None:
        """Nothing to follow any more: what is here may still serve."""
        directive = following.directive
        hopeless = isinstance(error, Overdue) or (isinstance(error, ShadowLost) and error.final)
        if isinstance(directive, ShadowRank):
            if hopeless:
                # Slow is not unfit: it may have a rank, but need not be tried again.
                return self._rehearsed(following, directive, note=str(error))
            return self._stand_by_with_state(following, error)
        if hopeless:
            # Slow is not unfit: only this move is refused.
            self.end()
            return ShadowEnd(Then.REFUSE, self._lateness(following, error))
        if self._agent.directive != directive:
            self._fabric.discard(directive.membership.epoch)
            return ShadowEnd(Then.STAND_BY)
        if self._called_again(directive, error):
            return None
        # Still wanted: have the state copied at the switch.
        self.end()
        log.warning("plan %s: shadow lost its rank: %s", directive.plan, error)
        return ShadowEnd(Then.AWAIT_STATE, str(error))

    def _called_again(self, directive: Prepare, error: LinkError) -> bool:
        """Start again over another link, if no rank can have been ordered to switch."""
        if self._reporter.status.activity is not Activity.SHADOWING or not self._recalls:
            return False
        timings, recalls = self._reporter.status.timings, self._recalls - 1
        self.end()
        try:
            link, said = ask(self._fabric, directive)
        except LinkError:
            return False
        if isinstance(said, Dropped):
            link.close()
            return False
        log.warning("plan %s: following anew, the link broke: %s", directive.plan, error)
        self.begin(directive, link, said.offer, timings, recalls)
        return True

    def _lateness(self, following: ShadowSession, error: LinkError) -> str:
        lag = following.lag
        return f"{error}: {lag.seconds:.3f} s behind at steps of {lag.step_s:.3f} s"

    def _take(self, following: ShadowSession) -> ShadowEnd | None:
        """The vote has given this worker the rank, and it has the state."""
        directive, told = following.directive, following.status()
        assert isinstance(directive, Prepare)
        if directive.plays != directive.rank:
            return ShadowEnd(Then.BECOME_RANK)
        following.take()
        self.following = None
        self._fabric.switch(directive.membership, directive.rank)
        self._reporter.update(
            WorkerTransition.TOOK_OVER,
            rank=directive.rank,
            epoch=directive.membership.epoch,
            shadow=None,
            timings={**self._reporter.status.timings, "transfer": 0.0, "lag": told.lag_s},
        )
        return None

    def study(self, directive: ShadowRank) -> Rebuild | None:
        """Begin to shadow a rank, or return the rebuild that must come first."""
        self.attempts.begin()
        try:
            link, said = ask(self._fabric, directive)
        except LinkError as error:
            log.info("rank %d cannot be followed now: %s", directive.rank, error)
            return None
        if isinstance(said, Dropped):
            link.close()
            if self._units.divided and said.offer is not None:
                self.not_tried(directive, note=UNFOLLOWED, heard=said.offer.roles)
            # Else the source is in a recovery, which may need what was shadowed until now.
            return None
        self.end()
        refusal = self._fit.refusal(directive.rank, said.offer)
        if not refusal:
            self.begin(directive, link, said.offer, {})
            return None
        link.close()
        if isinstance(refusal, Rebuild):
            self.attempts.repeat()
            return refusal
        self.not_tried(directive, refusal=refusal, heard=said.offer.roles)
        return None

    def not_tried(
        self,
        directive: ShadowRank,
        *,
        refusal: str = "",
        note: str = "",
        heard: Sequence[Role] = (),
    ) -> None:
        """Report why no step was rehearsed. ``heard``: the roles of all ranks, if just received."""
        verdict = Rehearsal(0, 0.0, refusal, note, directive.request)
        self._found(directive, verdict, heard)
        self._reporter.update(shadow=None)

    def _found(self, directive: ShadowRank, verdict: Rehearsal, heard: Sequence[Role] = ()) -> None:
        if verdict.refusal:
            log.error("no rank for this standby until it rehearses again: %s", verdict.refusal)
        else:
            log.info("rehearsed rank %d: %s", directive.plays, verdict.note or "same bits")
        self._reporter.tell_rehearsed(directive.plays, verdict, heard)
        self.attempts.settle(directive)

    def rolls_forward(self) -> bool:
        """The source ended before its vote: wait for the leader; whether the survivors commit."""
        following = self.following
        if following is None or not isinstance(following.directive, ShadowRank):
            return False
        self._say_standing_by(following, undecided=True)
        directive = self._agent.wait_a_while(lambda d: d != following.directive, NEWS_S)
        if isinstance(directive, HoldState):
            directive = self._agent.wait_until(lambda d: not isinstance(d, HoldState))
        return isinstance(directive, Sync) and directive.resume == following.step + 1

    def _stand_by_with_state(self, following: ShadowSession, error: LinkError) -> ShadowEnd | None:
        """A recovery may come that can use it."""
        log.info("rank %d: nothing more to follow: %s", following.directive.plays, error)
        following.shadow.close()
        self._fit.rest()
        if not (following.has_state and following.keeps_shadowing):
            return ShadowEnd(Then.STAND_BY)
        self._say_standing_by(following, undecided=False)
        return None

    def _say_standing_by(self, following: ShadowSession, *, undecided: bool) -> None:
        self._state.early.stand(following.step)
        self._state.early.begin()
        self._reporter.update(
            WorkerTransition.LEFT_ALONE,
            step=following.step,
            shadow=following.status(),
            undecided=undecided,
        )

    def end(self) -> None:
        """Follow no rank any more, and forget what was followed."""
        if self.following is not None:
            self.following.shadow.close()
            self.following = None
            self._fit.rest()

    def close(self) -> None:
        """The process ends: wait a while for the thread that reads."""
        if self.following is not None:
            self.following.shadow.end()

    def let_go(self) -> None:
        """This worker is to be built as another rank: say that it has no state of one any more."""
        if self.following is not None:
            self.end()
            self._reporter.update(shadow=None)
