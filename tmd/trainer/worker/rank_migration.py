"""Both sides of a rank migration: sends a rank's state, or takes over a rank.

This module reports progress in the worker's status and handles a failure of the other side.
:mod:`tmd.trainer.state_transfer` copies the whole state while training stands still;
:mod:`tmd.trainer.worker.shadow_driver` shadows a rank while training continues.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NoReturn

from tmd.core.planning.directives import Arm, Directive, Leave, Prepare, Sync
from tmd.core.values.errors import LinkError, StateMismatch
from tmd.core.values.model import Move, Rehearsal
from tmd.core.values.reasons import in_words
from tmd.core.worker.transitions import WorkerTransition
from tmd.fabric import Link, Neutral
from tmd.trainer.protocol.frames import Dropped, Opening
from tmd.trainer.protocol.offers import Offer
from tmd.trainer.protocol.take_over import Takeover, state_purpose
from tmd.trainer.session.hooks import dismiss
from tmd.trainer.shadow.receiver import ask
from tmd.trainer.snapshots.snapshots import Snapshots
from tmd.trainer.state_transfer.context import RankContext
from tmd.trainer.state_transfer.obstacle import Failed, NextLoop, Obstacle, Rebuild
from tmd.trainer.worker.agent import Agent
from tmd.trainer.worker.arming import build_time
from tmd.trainer.worker.shadow_driver import AfterShadow, ShadowDriver, ShadowEnd
from tmd.trainer.worker.status_reporter import StatusReporter

PREPARE_TIMEOUT_S = 30.0

log = logging.getLogger("tmd.trainer")


class RankMigration:
    """Main thread or :class:`Continuation`, except :meth:`cancel_unless`."""

    def __init__(
        self,
        reporter: StatusReporter,
        agent: Agent,
        context: RankContext,
        snapshots: Snapshots,
        hand_over: Callable[[], None],
    ) -> None:
        self._reporter = reporter
        self._agent = agent
        self._fabric = context.fabric
        self._state = context.state
        self._fit = context.fit
        self._verification = context.verification
        self._transfer = context.transfer
        self._snapshots = snapshots
        self.hand_over = hand_over
        """Lets the script flush what it has written for a rank that another worker holds now."""
        self._takeover: Takeover | None = None
        self.driver = ShadowDriver(reporter, agent, context)

    def cancel_unless(self, directive: Directive) -> None:
        """Cancel all work that belongs to another directive (any thread)."""
        self._transfer.cancel_unless(directive)
        self._snapshots.cancel_unless(directive)
        self.driver.cancel_unless(directive)

    def begun(self, *, trains: bool) -> None:
        """A step begins. If it ``trains``, parameters do not change until its optimizer runs, so a
        digest may be computed meanwhile. An evaluation may exchange weights and put them back: a
        digest that is being compared is completed first, and any other one is dropped."""
        if not trains:
            if self._verification.running:
                self._state.early.finish()
            return self._state.early.forget()
        self._state.early.stand(self.driver.step)
        # The directive may have arrived between two steps, where the parameters may change.
        self.driver.digest_early(self._agent.directive)

    # --- source -----------------------------------------------------------------------------------

    def send(self, directive: Arm | Sync, move: Move, *, mid_step: bool = False) -> bool:
        """Send this rank's state to the joiner; the leader handles a joiner that fails. Returns
        whether it was sent, or is being compared.

        ``mid_step``: it is only compared with the joiner's.
        """
        started = time.monotonic()
        try:
            size = self._transfer.send(
                directive,
                move,
                self._reporter.status.step,
                lambda: self._agent.directive == directive,
                mid_step=mid_step,
            )
        except (LinkError, StateMismatch) as error:
            log.warning("the state of rank %d was not sent: %s", move.rank, error)
            return False
        except Exception:
            # What keeps a state from moving must not end the rank that has it.
            log.exception("the state of rank %d was not sent", move.rank)
            return False
        seconds = time.monotonic() - started
        self._reporter.update(timings={"copy": seconds, "copy_bytes": float(size)})
        self._recheck()
        return True

    def _recheck(self) -> None:
        """Cancel if the directive changed before there was anything to cancel."""
        if (directive := self._agent.directive) is not None:
            self._transfer.cancel_unless(directive)

    # --- joiner: before a planned switch ----------------------------------------------------------

    def prepare(self, directive: Prepare) -> Rebuild | None:
        """Check that the state fits, open the links, and begin to shadow the rank.

        Returns the rebuild that must come first, if any.
        """
        started = time.monotonic()
        self.driver.end()
        link: Link | None = None
        refusal: str | Rebuild
        try:
            link, answer = ask(self._fabric, directive)
            # Without an offer the state itself is checked later.
            refusal = "" if answer.offer is None else self._misfit(directive, answer.offer)
            if not refusal:
                self._fabric.prepare(
                    directive.membership,
                    directive.rank,
                    timeout=PREPARE_TIMEOUT_S,
                    cancel=lambda: self._agent.directive != directive,
                )
                self._fabric.generations.prepare(
                    self._fabric.groups_of(directive.rank),
                    directive.membership,
                    when=build_time(directive),
                )
        except LinkError as error:
            refusal = str(error)
        if refusal:
            if link is not None:
                link.close()
            if isinstance(refusal, Rebuild):
                return refusal
            self.refuse(directive, refusal)
            return None
        assert link is not None
        # Not as rank 0: the script would print and save while it goes to the data position.
        self._fit.rest()
        timings = {"prepare": time.monotonic() - started}
        if self.driver.enabled and isinstance(answer, Opening):
            self.driver.begin(directive, link, answer.offer, timings)
        else:
            link.close()
            off = "the live shadow is switched off"
            why = answer.reason if isinstance(answer, Dropped) else off
            self._go_without_shadow(directive, why, timings)
        return None

    def _misfit(self, directive: Prepare, offer: Offer) -> str | Rebuild:
        """Why this worker cannot shadow one rank and then assume the other; empty if it can."""
        for rank in dict.fromkeys((directive.plays, directive.rank)):
            refusal = self._fit.refusal(rank, offer)
            if isinstance(refusal, Rebuild):
                return refusal
            if refusal:
                # The model does not change: a recovery would fail in the same way.
                verdict = Rehearsal(0, 0.0, refusal, refused_rank=rank)
                self._reporter.report_rehearsal(rank, verdict, offer.roles)
                return refusal
        self._fit.learn(offer)
        return ""

    def follow(self) -> Obstacle | None:
        """SHADOWING and IN_STEP: reach the point where the next step can be computed.

        A shadow that has ended leads to another activity. Returns an obstacle, if any.
        """
        directive = None if self.driver.following is None else self.driver.following.directive
        match self.driver.follow(), directive:
            case NextLoop() as needed, _:
                return needed
            case ShadowEnd(AfterShadow.STAND_BY), _:
                self.to_pool()
            case ShadowEnd(AfterShadow.REFUSE, reason), Prepare():
                self.refuse(directive, reason)
            case ShadowEnd(AfterShadow.AWAIT_STATE, reason), Prepare():
                self._go_without_shadow(directive, reason, self._reporter.status.timings)
            case ShadowEnd(AfterShadow.BECOME_RANK), Prepare():
                return self.become(directive)
        return None

    def _go_without_shadow(self, directive: Prepare, why: str, timings: dict[str, float]) -> None:
        """Wait for the rank's state; refuse an adopted rank, whose holder hands nothing over."""
        if directive.adopted:
            self.refuse(directive, why)
        else:
            self.expect_state(directive, why, timings)

    def expect_state(self, directive: Prepare, why: str, timings: dict[str, float]) -> None:
        """Stop-and-copy: the state follows after the switch."""
        self._await(Takeover(directive))
        self._reporter.update(
            WorkerTransition.PREPARED, plan=directive.plan, detail=why, shadow=None, timings=timings
        )

    def refuse(self, directive: Prepare, reason: str) -> None:
        """Report that this worker cannot take part in the plan."""
        self._fabric.discard(directive.membership)
        log.warning("plan %s refused: %s", directive.plan, reason)
        self._reporter.update(
            WorkerTransition.REFUSED, plan=directive.plan, detail=reason, shadow=None
        )

    def await_other_plan(self) -> None:
        """REFUSED: wait until the plan is dropped."""
        self._reporter.next_response()
        self.to_pool()

    # --- joiner: the whole state ------------------------------------------------------------------

    def take_over(self) -> Obstacle | None:
        """After a planned switch: receive the state and continue as the rank in the new epoch."""
        takeover = self._takeover
        assert takeover is not None
        # What it has shadowed need not be verified: the leaver compares it.
        shadowed = None if self.driver.following is None else self.driver.step
        if obstacle := self._received(takeover, shadowed):
            return obstacle
        self.driver.end()
        self._fabric.switch(takeover.membership, takeover.rank)
        self._reporter.update(
            WorkerTransition.TOOK_OVER,
            rank=takeover.rank,
            epoch=takeover.membership.epoch,
            step=takeover.step,
            holds=self._state.local.ranks_held(takeover.step),
            shadow=None,
            detail="",
            timings={**self._reporter.status.timings, **takeover.timings},
        )
        self._seek(takeover)
        return None

    def become(self, directive: Prepare) -> Obstacle | None:
        """The vote has given this worker the rank. It has shadowed a replica and lacks only the
        leaver's local state, or it has followed the gradients and the leaver compares the state."""
        if self._takeover is None or self._takeover.directive != directive:
            self._await(Takeover(directive))
        self._fit.rest()
        return self.take_over()

    def replace(self, directive: Sync) -> Obstacle | None:
        """After a loss: put the state of the lost rank in place, or return an obstacle."""
        if directive.back:
            return self._roll_back(directive)
        self._snapshots.only(directive.whole)
        if next(m for m in directive.moves if m.rank == directive.rank).source is None:
            return self._keep_shadowed(directive)
        takeover = self._takeover
        if takeover is None or takeover.directive != directive:
            takeover = Takeover(directive)
            self._await(takeover)
        self._fit.rest()
        alike = self._reporter.alike(directive.rank)
        if obstacle := self._received(takeover, self.driver.has_state_of(*alike)):
            return obstacle
        self._recheck()
        self.driver.end()
        self._impersonate(directive.rank)
        self._took(directive.rank, takeover.step, takeover.timings)
        self._seek(takeover)
        return None

    def _impersonate(self, rank: int) -> None:
        """Use the rank's data before the epoch is entered."""
        self._fabric.sandbox(Neutral(), rank, self._reporter.status.world_size)

    def _keep_shadowed(self, directive: Sync) -> Failed | None:
        """No other worker has this rank's state: continue from the shadowed one."""
        if self.driver.has_state_of(directive.rank) != directive.resume:
            detail = f"the state of rank {directive.rank} at step {directive.resume} is not here"
            self._reporter.update(WorkerTransition.REFUSED, plan=directive.plan, detail=detail)
            return Failed()
        self.driver.end()
        self._impersonate(directive.rank)
        self._took(directive.rank, directive.resume, {"transfer": 0.0})
        self._state.draw_anew()
        return None

    def _roll_back(self, directive: Sync) -> Obstacle | None:
        """No worker has this rank's latest state: restore an earlier one, as all ranks do."""
        started = time.monotonic()
        self.driver.end()
        self._fit.rest()
        # The copy may be here, and this worker rebuilt since it was made.
        if not self._fit.roles.serves(directive.rank):
            return Rebuild(directive.rank)
        if obstacle := self._tried(
            directive,
            lambda: self._snapshots.fetch(directive, lambda: self._agent.directive == directive),
        ):
            return obstacle
        if isinstance(rebuild := self._fit.start_over(directive), Rebuild):
            return rebuild
        if self._snapshots.is_ahead(directive):
            return NextLoop()
        self._impersonate(directive.rank)
        if obstacle := self._tried(directive, lambda: self._snapshots.put_back(directive)):
            return obstacle
        self._took(directive.rank, directive.resume, {"transfer": time.monotonic() - started})
        return None

    def _took(self, rank: int, step: int, timings: dict[str, float]) -> None:
        """The state of ``rank`` at the start of ``step`` is in place. Copies of the buffers of
        other ranks, from an earlier shadow, may be of another step."""
        holds = self._state.local.ranks_held(step)
        self._reporter.update(shadow=None, rank=rank, step=step, holds=holds, timings=timings)

    def _seek(self, takeover: Takeover) -> None:
        """Go to the rank's data position, where the script must already see the rank."""
        assert takeover.header is not None
        self._state.seek(takeover.header.offer.position)

    def leave(self, directive: Directive) -> NoReturn:
        """End this worker, which has held a rank, as ``directive`` demands."""
        if isinstance(directive, Leave) and not directive.code:
            self.hand_over()
        dismiss(directive)

    def to_pool(self) -> None:
        """Give up any held or impersonated rank and stand by."""
        self._verification.drop()
        self.driver.end()
        if self._takeover is not None:
            self._fabric.discard(self._takeover.membership)
            self._await(None)
        self._fit.rest()
        self._state.local.forget()
        self._fabric.raw.decline_none()  # the same state may be sent to it again
        # Also what was prepared for a recovery that goes on without this worker.
        self._fabric.generations.discard()
        self._fabric.generations.reap()
        # A checkpoint that it missed as a rank concerns the rank's next holder.
        none: dict[str, Any] = {"rank": None, "shadow": None, "missed": None, "holds": ()}
        self._reporter.update(WorkerTransition.STOOD_BY, plan="", detail="", **none)

    def _await(self, takeover: Takeover | None) -> None:
        """Expect another take-over, or none, and close the link of the previous one."""
        before, self._takeover = self._takeover, takeover
        if before is not None and before.link is not None:
            before.link.close()

    def _received(self, takeover: Takeover, has_step: int | None = None) -> Obstacle | None:
        """Receive the state, or return an obstacle."""

        def cancelled() -> bool:
            return not takeover.wanted(self._agent.directive)

        def attempt() -> Obstacle | None:
            try:
                return self._transfer.receive(takeover, cancelled, has_step)
            except LinkError:
                if cancelled():
                    raise
            # A source in the middle of a step cannot send its whole state: it calls again later.
            # So does one whose link has broken.
            takeover.link = takeover.header = None
            return self._transfer.receive(takeover, cancelled)

        obstacle = self._tried(takeover.directive, attempt)
        if obstacle is None:
            self._await(None)
            self._fabric.raw.decline(state_purpose(takeover.directive, takeover.rank))
        return obstacle

    def _tried(
        self, directive: Prepare | Sync, attempt: Callable[[], Obstacle | None]
    ) -> Obstacle | None:
        """Run ``attempt``; if it fails, report it and change the status accordingly."""
        try:
            return attempt()
        except StateMismatch as error:
            self._await(None)
            log.warning("plan %s refused: %s", directive.plan, error)
            self._reporter.update(WorkerTransition.REFUSED, plan=directive.plan, detail=str(error))
        except (TypeError, ValueError, LookupError, RuntimeError) as error:
            self._await(None)
            log.exception("plan %s refused: the state cannot be put in place", directive.plan)
            detail = f"the state cannot be put in place: {type(error).__name__}: {in_words(error)}"
            self._reporter.update(WorkerTransition.REFUSED, plan=directive.plan, detail=detail)
        except LinkError as error:
            log.warning("state not received for plan %s: %s", directive.plan, error)
            self._agent.wait_until(lambda d: d != directive)
            self.to_pool()
        return Failed()
