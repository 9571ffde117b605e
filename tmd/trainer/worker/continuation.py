"""Finishes a step during which a rank was lost, with that rank's hot standby in its place.

The operations of the step wait (:mod:`tmd.fabric.unfinished_step`), and with them, sooner or later,
the main thread. Meanwhile a thread of its own, the *continuation thread*, does what the main thread
does at the boundary after a broken step: it reports the halt, is ready for the resume step, and
enters the new epoch. There all members agree on the operation from which each group goes on.
Wherever that is not possible the thread gives up: the operations end without a result, and the main
thread repeats the step.

Hazard: the rest of the worker calls the same functions in the main thread. The continuation thread
calls them only while the step is suspended: the main thread is then in the script, or waits. After
a vote that broke, the main thread itself does all this.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeGuard

from tmd.core.planning.directives import Directive, Hold, HoldState, Resume, Sync, Train
from tmd.core.values.model import Activity
from tmd.core.worker.broken_step import Place, reruns
from tmd.core.worker.responses import Response
from tmd.trainer.protocol.step_vote import exchange
from tmd.trainer.protocol.take_over import Takeover, state_purpose
from tmd.trainer.shadow.session import ShadowSession
from tmd.trainer.shadow.sources import ShadowSources
from tmd.trainer.snapshots.snapshots import Snapshots
from tmd.trainer.state_transfer.context import RankContext
from tmd.trainer.worker.agent import Agent
from tmd.trainer.worker.recovery import Recovery
from tmd.trainer.worker.shadow_driver import ShadowDriver
from tmd.trainer.worker.status_reporter import StatusReporter
from tmd.trainer.worker.unheard_vote import can_stand_in

LONGEST_S = 15.0
"""Longest wait for the next directive: a new leader may be needed. Then the step is repeated."""
REST_S = 5.0
"""Longest wait for operations to end once their links are cut, and at the end for the thread."""

log = logging.getLogger("tmd.trainer")


class FinishingParts(NamedTuple):
    """The parts of a worker that take part in finishing a step."""

    sources: ShadowSources
    snapshots: Snapshots
    driver: ShadowDriver
    recovery: Recovery


class Decided:
    """Called with each directive of a hot standby: whether it settles what becomes of the standby.

    ``before`` is the directive by which the standby followed its rank. A plan makes it hold its
    state meanwhile. If ``before`` comes again after that, the rank lives, and the standby is to
    follow it as before.
    """

    def __init__(self, before: Directive) -> None:
        self._before, self._held = before, False

    def __call__(self, directive: Directive) -> bool:
        if isinstance(directive, HoldState):
            self._held = True
            return False
        return self._held or directive != self._before


class Continuation:
    """Owns a thread for each suspended step."""

    def __init__(
        self,
        reporter: StatusReporter,
        agent: Agent,
        context: RankContext,
        parts: FinishingParts,
        halt: Callable[[], None],
    ) -> None:
        """``halt`` reports that the step of this rank broke."""
        self._reporter, self._agent, self._context = reporter, agent, context
        self._sources, self._snapshots, self._driver, self._recovery = parts
        self._halt = halt
        self._fabric = context.fabric
        self._closed = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._followed = False
        """Whether a standby follows any rank, as of the last vote."""
        self._fabric.step.on_break = self._suspended

    # --- main thread ---------------------------------------------------------------------------

    @property
    def ballot(self) -> int:
        """What this rank adds to the vote: -1 if a standby follows it and a broken step can be
        finished, else 0. If the least of all ranks is -1, all ranks keep their inputs."""
        return -int(self._able and self._sources.follows)

    @property
    def _able(self) -> bool:
        """Whether a broken step of this job can ever be finished instead of repeated."""
        if not self._context.limits.finish_steps or self._context.units.divided:
            return False
        if self._fabric.passes.shrunk:
            return False
        return self._fabric.generations.kind is None  # an inner group cannot run an operation again

    def voted(self, least: int) -> None:
        """Apply the vote's result, equal on every rank: the least number of all."""
        self._followed = least < 0

    @property
    def _keeps(self) -> bool:
        """Whether a step that begins now may be finished after a loss: a standby follows a rank."""
        following = self._driver.following
        if following is not None:
            return self._able and following.keeps_shadowing
        if self._fabric.passes.shrunk:
            return False
        return self._followed and self._reporter.status.activity is Activity.TRAINING

    def at_boundary(self) -> None:
        """The script gets a batch. After a loss in the step all ranks compare the state that they
        had here: a rank that has not begun the step has no later one."""
        if self._keeps:
            self._context.state.early.stand(self._driver.step)
            self._context.state.early.keep_rest()

    def begin_step(self, *, trains: bool) -> None:
        """A step begins, in which an optimizer runs if it ``trains``. Otherwise it is a function of
        ``session.repeatable``, which is always repeated after a loss: a standby that has run it as
        a shadow has written and printed nothing."""
        self._fabric.calls.stepping = threading.current_thread()
        self._fabric.step.begin(keeps=trains and self._keeps)

    def close(self) -> None:
        """Give up a suspended step, since the process ends, and wait for the thread."""
        with self._starting:
            self._closed = True
        self._fabric.step.give_up()
        if self._thread is not None:
            # A thread that is still waiting for a directive then is not inside torch.
            self._thread.join(REST_S)

    # --- its own thread ------------------------------------------------------------------------

    def _suspended(self) -> None:
        """A step was suspended (any thread)."""
        with self._starting:
            if not self._closed and self._started():
                return
        self._give_up()

    def _started(self) -> bool:
        """Start the thread; ``False`` if the system refuses one."""
        thread = threading.Thread(target=self._run, name="tmd-continuation", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        began = time.monotonic()
        if self.try_to_finish():
            self._fabric.step.resume()
            log.info("the step goes on after %.3f s", time.monotonic() - began)
        else:
            self._give_up()

    def _give_up(self) -> None:
        if (sandbox := self._fabric.sandboxed) is not None:
            # Otherwise a shadow would compute its step again without its rank.
            sandbox.source.spoil()
        self._fabric.step.give_up()

    def try_to_finish(self) -> bool:
        """Try to continue the step in a new epoch; returns whether all its members do.

        Called by this thread while the step is suspended, and by the main thread after a vote that
        broke and after which no rank is known to have committed.
        """
        try:
            if not self._fabric.step.can_go_on:
                return False
            following = self._driver.following
            order = self._as_rank() if following is None else self._as_follower(following)
            if order is None or not self._enters(order):
                return False
        except Exception as error:
            log.warning("the broken step is repeated: %s", error, exc_info=True)
            return False
        return True

    # --- a survivor ----------------------------------------------------------------------------

    def _as_rank(self) -> Sync | None:
        """Halt, and be ready for the same step in the next epoch; ``None`` if it is repeated."""
        if self._reporter.status.activity is Activity.TRAINING:
            if self._context.verification.pending:
                # This rank's own state may have to be given back.
                return None
            self._halt()
        step, directive = self._reporter.status.step, self._decision()
        if not self._may_finish(directive, step):
            return None
        began = time.monotonic()
        self._snapshots.only(directive.whole)
        if not self._recovery.send(directive, mid_step=True):
            return None
        self._recovery.synced(directive, time.monotonic() - began)
        return directive

    def _decision(self) -> Directive | None:
        """What is to follow the halt; ``None`` if only the main thread can carry it out."""
        while (found := self._reporter.next_response_within(LONGEST_S)) is not None:
            match found:
                case Response.ACKNOWLEDGE, Hold(plan=plan, continues=continues):
                    self._reporter.update(plan=plan)
                    if not continues:
                        break
                case Response.SYNC, Sync() as directive:
                    return directive
                case _:
                    break
        return None

    # --- the standby that follows the lost rank ------------------------------------------------

    def _as_follower(self, following: ShadowSession) -> Sync | None:
        """Become the rank in its unfinished step; ``None`` if that is not what the plan wants."""
        self._fabric.step.at_rest(REST_S)  # a mismatch is known only once no operation runs
        if not can_stand_in(following) or following.refutation() is not None:
            return None
        if self._reporter.status.activity is not Activity.STANDBY:
            self._driver.report_standing_by(following, undecided=False)
        directive = self._agent.wait_a_while(Decided(following.directive), LONGEST_S)
        if not self._may_finish(directive, following.step):
            return None
        began = time.monotonic()
        if not self._compares(directive, following):
            return None
        self._driver.take_place()
        self._reporter.update(shadow=None, rank=directive.rank, step=following.step, now=False)
        self._recovery.synced(directive, time.monotonic() - began)
        return directive

    def _compares(self, directive: Sync, following: ShadowSession) -> bool:
        """Begin to compare this state with the source's, which must end before the vote. Returns
        whether this worker may take the rank: the plan gives it the one that it follows, and the
        comparison has begun, or no other worker has the state."""
        worker = self._reporter.status.worker
        move = next(m for m in directive.moves if m.rank == directive.rank)
        if move.joiner is None or move.joiner.worker != worker:
            return False
        if directive.rank != following.directive.plays:
            return False
        if move.source is None:
            return True  # no other worker has this state
        takeover = Takeover(directive)
        transfer, step = self._context.transfer, following.step
        transfer.verify(takeover, step, lambda: not takeover.wanted(self._agent.directive))
        # The directive may have changed before there was anything to cancel.
        if (present := self._agent.directive) is not None:
            transfer.cancel_unless(present)
        # The source may have to begin the step again, and call all its joiners for that.
        self._fabric.raw.decline(state_purpose(directive, directive.rank))
        return takeover.wanted(present)

    # --- both ----------------------------------------------------------------------------------

    def _may_finish(self, directive: Directive | None, step: int) -> TypeGuard[Sync]:
        """Whether ``directive`` lets this worker finish ``step``, which it is in. The first step of
        a job is never finished: some scripts build their model anew after a loss in it."""
        return (
            not self._closed
            and isinstance(directive, Sync)
            and directive.continues
            and directive.resume == step > 0
            and not directive.back
        )

    def _enters(self, synced: Sync) -> bool:
        """Enter the new epoch; returns whether all its members go on with the step."""
        match self._reporter.next_response_within(LONGEST_S, under=synced):
            case (Response.ENTER, (Resume() | Train()) as directive) if not self._closed:
                pass
            case _:
                return False
        step, fabric = self._reporter.status.step, self._fabric
        fabric.enter(directive.membership, directive.rank, mid_step=True)
        self._recovery.entered(directive, mid_step=True)
        places = exchange(fabric, fabric.step.place(step), Place)
        again = reruns(places)
        if again is None:
            log.warning("the broken step is repeated: a rank cannot go on with it: %s", places)
            return False
        fabric.step.go_back(again)
        return True
