"""A survivor's part in a recovery: from the broken step until all ranks train again."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

from tmd.core.planning.directives import (
    Directive,
    Finish,
    Hold,
    Resume,
    Sync,
    Train,
    Wait,
)
from tmd.core.planning.failover import keepers_first
from tmd.core.values.errors import LinkError
from tmd.core.values.model import Move
from tmd.core.worker.broken_step import Place, reruns
from tmd.core.worker.responses import Response, respond
from tmd.core.worker.transitions import WorkerTransition
from tmd.trainer.protocol.step_vote import exchange
from tmd.trainer.snapshots.snapshots import Snapshots
from tmd.trainer.state_transfer.context import RankContext
from tmd.trainer.state_transfer.obstacle import Rebuild
from tmd.trainer.worker.agent import Agent
from tmd.trainer.worker.rank_migration import RankMigration
from tmd.trainer.worker.status_reporter import StatusReporter

CALL_S = 0.5
"""Timeout of a link that is opened in advance; the step itself waits for a slower peer."""
AGAIN_S = 2.0
"""Time for the leader to change the plan if a state could not be sent, before it is sent again."""

log = logging.getLogger("tmd.trainer")


class Recovery:
    """Main thread or :class:`Continuation`, except :meth:`digest_early`."""

    def __init__(
        self,
        reporter: StatusReporter,
        agent: Agent,
        context: RankContext,
        migration: RankMigration,
        snapshots: Snapshots,
    ) -> None:
        self._reporter = reporter
        self._agent = agent
        self._fabric = context.fabric
        self._state = context.state
        self._fit = context.fit
        self._verification = context.verification
        self._migration = migration
        self._snapshots = snapshots
        self._synced_for: Sync | None = None
        self._resolved: Directive | None = None
        self.finishing = False
        """Whether another rank has reached the end of training."""

    @property
    def pending(self) -> bool:
        """Whether a decision was received that the next boundary must carry out."""
        return self._resolved is not None

    def is_refuted(self) -> bool:
        """Before a vote: wait for the verification of a state held on trust; returns whether it
        failed. No rank continues with such a step."""
        if not self._verification.pending:
            return False
        began = time.monotonic()
        why = self._verification.verdict()
        timings = {**self._reporter.status.timings, "proof": time.monotonic() - began}
        self._reporter.update(timings=timings, now=False)
        if why:
            self._fabric.poison(why)
        return bool(why)

    def halt(self, *, undecided: bool) -> None:
        """Report that the step broke, and whether its gradients are complete."""
        # First: the reported snapshots must not change afterwards.
        self._snapshots.give_up()
        log.warning("step %d broke: %s", self._reporter.status.step, self._fabric.poison_reason)
        if self._gave_back():
            return
        self._reporter.update(
            WorkerTransition.HALTED,
            undecided=undecided,
            suspects=self._fabric.suspects,
            plan="",
            armed=0,
        )
        self._state.early.stand(self._reporter.status.step)
        self.digest_early(self._agent.directive)

    def _gave_back(self) -> bool:
        """Give the rank back if its state, held on trust, was refuted; returns whether it was."""
        why = self._verification.verdict()
        if why:
            log.warning("giving rank %s back: %s", self._reporter.status.rank, why)
            self._migration.to_pool()
        return bool(why)

    def digest_early(self, directive: Directive | None) -> None:
        """Start the digest early if this worker is the likely source (any thread)."""
        if not isinstance(directive, Hold):
            return
        status = self._reporter.status
        for lost in directive.hot:
            alike = set(self._reporter.alike(lost)) - set(directive.hot)
            asked = (r for r in keepers_first(lost, status.world_size) if r in alike)
            if status.rank is not None and status.rank == next(asked, None):
                self._state.early.begin()

    def wait_for_outcome(self) -> bool:
        """After a broken vote: whether another rank committed, so that this rank must as well."""
        directive = self._decision()
        self._resolved = directive
        return isinstance(directive, Finish) or (
            isinstance(directive, Sync) and directive.resume == self._reporter.status.step + 1
        )

    def settle(self) -> Rebuild | None:
        """STUCK: wait for the resume step, and get ready for it.

        Returns the rebuild that must come first, if any.
        """
        directive, self._resolved = self._resolved, None
        # After the vote the script may have run for long, and another rank may be lost since.
        if directive is None or directive != self._agent.directive:
            directive = self._decision()
        if isinstance(directive, Sync):
            self._snapshots.only(directive.whole)
        match respond(directive, self._reporter.status), directive:
            case Response.FINISH, _:
                self.finishing = True
                self._reporter.update(WorkerTransition.JOB_ENDED, plan="")
            case Response.SYNC, Sync():
                return self._sync(directive)
            case _:
                # Another worker holds this rank in a later epoch, or a source sends its state.
                self._stand_by(directive)
        return None

    def _stand_by(self, directive: Directive | None) -> None:
        self._migration.to_pool()
        if isinstance(directive, Wait):
            # Only now: until then the plan might have given the rank back to this worker.
            self._migration.hand_over()

    def _sync(self, directive: Sync) -> Rebuild | None:
        rebuild = self._fit.start_over(directive, survives=not directive.back)
        if isinstance(rebuild, Rebuild):
            return rebuild
        started = time.monotonic()
        if directive.back:
            # A separate thread sends copies to others.
            self._snapshots.put_back(directive)
            self._reporter.update(step=directive.resume, holds=(), now=False)
        else:
            self.send(directive)
        self.synced(directive, time.monotonic() - started)
        return None

    def send(self, directive: Sync, *, mid_step: bool = False) -> bool:
        """Send this state to the joiners whose source this worker is; returns whether all have it.

        ``mid_step``: it is only compared with theirs.
        """
        own = self._reporter.status.worker
        served = [m for m in directive.moves if m.source is not None and m.source.worker == own]
        sent = [self._sent(directive, move, mid_step) for move in served]
        return all(sent)

    def _sent(self, directive: Sync, move: Move, mid_step: bool) -> bool:
        if self._migration.send(directive, move, mid_step=mid_step):
            return True
        # If both workers are well, the leader knows of no trouble: only this one can try again.
        if mid_step or self._agent.wait_a_while(lambda d: d != directive, AGAIN_S):
            return False
        return self._migration.send(directive, move)

    def synced(self, directive: Sync, seconds: float) -> None:
        """Report that this worker is ready for the resume step."""
        self._synced_for, self._resolved = directive, None
        timings = {**self._reporter.status.timings, "sync": seconds}
        self._reporter.update(
            WorkerTransition.SYNCED, plan=directive.plan, undecided=False, timings=timings
        )
        # Others still copy; otherwise the first step would open the links one by one.
        self._fabric.prepare_recovery(
            directive.membership,
            directive.rank,
            timeout=CALL_S,
            cancel=lambda: self._agent.directive != directive,
        )

    def rejoin(self) -> None:
        """SYNCED: wait for the other ranks, then train in the new epoch."""
        response, directive = self._reporter.next_response(under=self._synced_for)
        match response, directive:
            case Response.ENTER, Resume() | Train():
                self._fabric.enter(directive.membership, directive.rank)
                self.entered(directive)
                self._begin_afresh()
            case Response.HALT, Hold() | Sync():
                if not self._gave_back():
                    self._reporter.update(WorkerTransition.HALTED, plan=directive.plan)
            case Response.STAND_BY, _:
                self._stand_by(directive)
            case _:
                self._migration.leave(directive)

    def entered(self, directive: Resume | Train, *, mid_step: bool = False) -> None:
        """Report that this worker trains in the new epoch. ``mid_step``: its state may have to
        be compared again."""
        if not (mid_step or self._verification.running):
            self._state.early.forget()
        self._reporter.update(
            WorkerTransition.ENTERED,
            rank=directive.rank,
            epoch=directive.membership.epoch,
            suspects=(),
            timings=self._reporter.status.timings,
        )

    def _begin_afresh(self) -> None:
        """Let ranks that are in the middle of the step know that this one begins it."""
        step = self._reporter.status.step
        # If it fails the epoch is poisoned, and the next boundary halts.
        with suppress(LinkError):
            places = exchange(self._fabric, self._fabric.step.place_before(step), Place)
            under_way = any(not place.afresh for place in places)
            again = reruns(places)
            if under_way and again is not None:
                self._snapshots.skip(step)
                self._fabric.step.expect(again)

    def _decision(self) -> Directive:
        """Wait for the resume step; acknowledge the halt to each plan that asks."""
        while True:
            response, directive = self._reporter.next_response()
            match response, directive:
                case Response.ACKNOWLEDGE, Hold(plan=plan):
                    self._reporter.update(plan=plan)
                case Response.EXIT, _:
                    self._migration.leave(directive)
                case _:
                    return directive
