"""Implements the session's hooks for a managed job.

The main thread passes :meth:`Coordinator.vote` before the optimizer and
:meth:`Coordinator.boundary` before each batch. Both return only when the worker must train. Until
then :meth:`tmd.trainer.worker.wiring.WorkerParts.act` carries out each activity.
Hazard: the agent's thread calls :meth:`Coordinator.obey`, and no other method.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from tmd.core.planning.directives import Arm, Directive, Train
from tmd.core.values.checkpoints import MissedCheckpoint, SavedCheckpoint
from tmd.core.values.errors import LinkError
from tmd.core.values.limits import ShadowLimits
from tmd.core.values.model import Activity, WorkerStatus
from tmd.core.worker.responses import Response
from tmd.core.worker.transitions import WorkerTransition
from tmd.fabric import Fabric, Neutral
from tmd.trainer.protocol.step_vote import VoteKind, agree, gather
from tmd.trainer.session.handovers import Handovers
from tmd.trainer.session.hooks import LOST_IN_SETUP, SHADOWS, Interrupted, VoteOutcome, dismiss
from tmd.trainer.shadow.session import ShadowSession
from tmd.trainer.state.data import Feed
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.replicas import Partition, group_of
from tmd.trainer.state.state import Registry
from tmd.trainer.state_transfer.context import RankContext
from tmd.trainer.state_transfer.obstacle import NextLoop, Rebuild
from tmd.trainer.state_transfer.verification import StateVerdict
from tmd.trainer.worker.adopted_ranks import AdoptedRanks
from tmd.trainer.worker.agent import Agent
from tmd.trainer.worker.arming import Arming, halt_if_ordered, must_wait
from tmd.trainer.worker.pacing import Pacing
from tmd.trainer.worker.peer_watchdog import PeerWatchdog
from tmd.trainer.worker.status_reporter import StatusReporter
from tmd.trainer.worker.step_health import StepHealth
from tmd.trainer.worker.unheard_vote import can_stand_in, has_closed, stands_in, wait_for_outcome
from tmd.trainer.worker.warmup import Warmup
from tmd.trainer.worker.wiring import WorkerParts, assemble

log = logging.getLogger("tmd.trainer")


class Coordinator:
    """The hooks of a managed job. Owns fabric and agent from :meth:`start` on."""

    adoption: AdoptedRanks
    health: StepHealth
    _agent: Agent
    _arming: Arming
    _fabric: Fabric
    _limits: ShadowLimits
    _pacing: Pacing

    def __init__(self, status: WorkerStatus) -> None:
        self._reporter = StatusReporter(status)
        self._switch: Arm | None = None
        self._warmup, self.handovers = Warmup(), Handovers()
        self._known: WorkerParts | None = None

    # --- set-up -----------------------------------------------------------------------------------

    def start(self, agent: Agent, fabric: Fabric, limits: ShadowLimits, *, one_run: bool) -> None:
        """Wait for a role. A standby gets neutral groups, an active worker its rank.

        If training has ended already, a worker for ``one_run`` leaves; another one waits until the
        job runs again.
        """
        self._agent, self._fabric, self._limits = agent, fabric, limits
        self._pacing = Pacing(fabric.blocked)
        self.adoption = AdoptedRanks(fabric)
        self.health = StepHealth(fabric, lambda: self.status.activity, lambda: self._following)
        self._arming = Arming.of(fabric, self._reporter.report_armed, lambda: self.status)
        self._reporter.open(agent, fabric)
        self._watchdog = PeerWatchdog.started(fabric)
        response, directive = self._reporter.next_response(one_run=one_run)
        if response is Response.ABANDON:
            raise RuntimeError(LOST_IN_SETUP)
        if response is Response.EXIT:
            dismiss(directive)
        if isinstance(directive, Train):
            self._warmup.skip()
            rank, epoch = directive.rank, directive.membership.epoch
            self._fabric.enter(directive.membership, rank)
            self._reporter.update(WorkerTransition.ENTERED, rank=rank, epoch=epoch, first_rank=rank)
        else:
            size = self.status.world_size
            self._fabric.sandbox(Neutral(), size - 1, size)
            self._reporter.update(first_rank=size - 1)

    def set_builder(self, again: Callable[[], None]) -> None:
        """Let ``again`` build any rank that is held or impersonated from now on; RuntimeError."""
        self._warmup.set_builder(again)
        self._warmup.build(self._fabric)

    def registered(
        self,
        registry: Registry,
        wrapped: list[nn.Module],
        local: LocalState,
        alike: Partition,
        snapshots: int,
    ) -> None:
        """The script has registered its state, which can move from now on."""
        if self._known is None:
            context = RankContext.of(
                self._fabric, self._limits, registry, wrapped, local, several=self._warmup.several
            )
            self._known = assemble(
                self._reporter,
                self._agent,
                context,
                snapshot_every=snapshots,
                alike=alike,
                alone=self.shadowing,
                handovers=self.handovers,
                halt=partial(self._halt, undecided=False),
            )
        else:
            self._context.state.renew()
            self._context.fit.renew()
        serves = group_of(alike, self.rank) if self._warmup.several else ()
        self._reporter.registered(alike, wrapped, serves, self._context.fit.roles)

    def close(self) -> None:
        """Stop the threads, as none may be inside torch when the process ends; report once more."""
        if self._known is not None:
            self._known.close()
        self._watchdog.close()
        self._agent.close()

    def seeds(self, own: int) -> tuple[int, ...]:
        """Base seeds of all ranks; a joiner gets them from its source."""
        return self._context.fit.agreed_seeds(own, alone=self.shadowing)

    def gathered(self, own: str) -> tuple[str, ...]:
        """Exchange a string among all ranks during set-up. Raises RuntimeError."""
        return gather(self._fabric, own, str)

    def resumed(self, step: int, local: LocalState) -> None:
        """The job resumes from a checkpoint of ``step``."""
        self._reporter.update(step=step, holds=local.ranks_held(step))

    def saved(self, saved: SavedCheckpoint | None, missed: MissedCheckpoint | None) -> None:
        """Report a new or a missed checkpoint; any thread."""
        # A worker without a rank does not know whether the next checkpoint succeeds.
        missed = None if self.status.rank is None else missed
        self._reporter.update(saved=saved, missed=missed, now=False)

    def follow(self, feed: Feed) -> None:
        """Data positions refer to ``feed`` from now on."""
        self._context.state.feed = feed

    # --- vote and boundary ------------------------------------------------------------------------

    def begun(self, *, trains: bool = True) -> None:
        """The script begins to compute a step, in which an optimizer runs if it ``trains``."""
        self.adoption.begun()
        self._pacing.begin()
        self._parts.begin_step(trains=trains)

    def vote(self, local: LocalState, kind: VoteKind = VoteKind.STEPPING) -> VoteOutcome:
        """Whether this step is committed; raises Interrupted if not."""
        if self._known is not None and self._fabric.step.come_to_vote():
            raise Interrupted
        if self.idle:
            return VoteOutcome.SHADOW
        if self.status.activity is Activity.STUCK:
            raise Interrupted  # another attempt with the same batch: the previous one broke
        while not self._won(local, kind):
            if not self._parts.continuation.try_to_finish():
                raise Interrupted
        self._fabric.step.voted()
        return VoteOutcome.COMMIT

    def _won(self, local: LocalState, kind: VoteKind) -> bool:
        """Vote once; returns whether the step is committed."""
        self._fabric.settle()
        parts, status = self._parts, self.status
        self.adoption.come_to_vote(local)
        if self.health.broken:
            return False
        if parts.recovery.is_refuted():
            raise Interrupted
        pace = self._pacing.ballot(status, alone=self._fabric.passes.shrunk)
        snapshot = parts.snapshots.ballot(status.step, torn=local.torn)
        ballot = (snapshot, parts.continuation.ballot, *pace)
        try:
            local.exchange_copies(status.step, self.rank, status.world_size, self.adoption.hand_on)
        except LinkError:
            # This worker does not vote. If it is a hot standby, its rank may have voted.
            return can_stand_in(self._following) and self._wait_for_outcome()
        waits = partial(must_wait, self._fabric, parts.sources, status.step)
        armed = self._arming.begin_vote(lambda order: kind is VoteKind.REPEATING or waits(order))
        try:
            agreed, result = agree(self._fabric, status.step, armed, kind, ballot)
        except LinkError:
            self._arming.end_vote(0)
            return self._wait_for_outcome()
        self._switch = self._arming.end_vote(agreed)
        parts.sources.close_window()
        parts.continuation.voted(result[1])
        self._pacing.voted(status, result[2:])
        if self._following is not None:
            self._following.voted(agreed, trained=kind is VoteKind.STEPPING)
        else:
            parts.snapshots.voted(result[0])
        return True

    def verdict(self) -> StateVerdict:
        """Verdict on a copy of the state at this boundary: :meth:`StateVerification.later`."""
        return self._context.verification.later()

    def applying(self, optimizer: torch.optim.Optimizer) -> None:
        """The vote is over and ``optimizer`` is about to run."""
        self._context.state.early.forget()
        if self.status.activity is Activity.TRAINING:
            self._parts.sources.before_optimizer(self.status.step, optimizer)

    def boundary(self) -> bool:
        """Before a batch: do all that can only be done between two steps.

        Returns False if the present ``batches()`` call has no batch for this worker: the data
        position of the rank that it joins as is in a later call. Raises SystemExit if this worker
        is not needed any more.
        """
        self._fabric.step.leave_behind()
        self.adoption.leave_step()
        while not self._may_train():
            if self.status.activity is Activity.TRAINING:
                self._switch_or_halt()
                continue
            match self._parts.act(self.status.activity):
                case Rebuild() as rebuild:
                    self._parts.pool.become(rebuild, self._warmup)
                case NextLoop():
                    return False
        if self.status.activity is Activity.TRAINING and not self.finishing:
            self._parts.at_boundary(self.status.step)
        self._parts.continuation.at_boundary()
        return True

    def close_feed(self, feed: Feed, local: LocalState) -> bool:
        """At the end of a ``batches()`` call: wait until every rank has committed its last step.

        Voted and counted like a step, so that after a loss all ranks know whether the call has
        ended. Returns False if it must be called again.
        """
        if self.idle:
            self._warmup.skip()  # the loader is too short for all shadow iterations
            return False
        if self.finishing:
            return True
        if self._parts.recovery.is_refuted():
            return False
        try:
            agree(self._fabric, self.status.step, 0, VoteKind.CLOSING)
        except LinkError:
            if not has_closed(self._following, self._wait_for_outcome, self._agent, self._reporter):
                return self.finishing
        feed.close()
        local.carry_over(self.status.step)
        self.advance(local)
        return self._leaves(feed)

    def _leaves(self, feed: Feed) -> bool:
        """Leave a loop that has ended. A stand-in takes its rank first, as the script may end next.
        Returns false if another plan has put it back into the loop."""
        if stands_in(self._following) and not (self.boundary() and feed.closed and not self.idle):
            return False
        self.left_loop(feed)
        return True

    def left_loop(self, feed: Feed) -> None:
        """The script has left its loop over ``feed``."""
        self._parts.left_loop(feed)

    @property
    def _parts(self) -> WorkerParts:
        assert self._known is not None, "session.register() comes first"
        return self._known

    @property
    def _context(self) -> RankContext:
        return self._parts.context

    @property
    def _following(self) -> ShadowSession | None:
        return None if self._known is None else self._known.driver.following

    @property
    def status(self) -> WorkerStatus:
        return self._reporter.status

    @property
    def rank(self) -> int:
        """The rank that is held, or impersonated; of several held ones the one that is shown."""
        held = None if self._fabric.passes.shrunk else self.status.rank
        return held if held is not None else self._fabric.rank or 0

    def current(self) -> WorkerStatus:
        """The status with current measurements."""
        return self._reporter.current()

    @property
    def finishing(self) -> bool:
        """Whether another rank has reached the end of training."""
        return self._parts.recovery.finishing

    @property
    def calls(self) -> int:
        """How many collectives and messages the script has called."""
        return self._fabric.calls.begun

    @property
    def shadowing(self) -> bool:
        """Whether the current step is never committed."""
        return self.status.activity in SHADOWS or self._warmup.is_due(self.status.activity)

    @property
    def idle(self) -> bool:
        """Whether this worker neither holds nor shadows a rank, so that no vote concerns it."""
        waits = self.status.activity in (Activity.STARTING, Activity.STANDBY)
        return (waits and not stands_in(self._following)) or self._warmup.is_due(
            self.status.activity
        )

    def committed(self, local: LocalState, loss: float | None, seconds: float) -> None:
        """The step was committed."""
        took = self._pacing.took(seconds)
        self._reporter.update(loss=loss, step_seconds=seconds, pace=took, now=False)
        self.advance(local)

    def advance(self, local: LocalState) -> None:
        """Advance by one step, or by what counts as one: the end of ``batches()``, say."""
        at = self.status.step + 1
        self._reporter.update(step=at, undecided=False, holds=local.ranks_held(at), now=False)
        self._fabric.generations.reap()
        if self._following is not None:
            self._following.computed(self.status.step)

    def warn(self, **found: str) -> None:
        """Report a mistake found in the script; ``found`` maps a status field to its message."""
        self._reporter.update(None, now=True, **found)

    def shadowed(self) -> None:
        """A shadow iteration has ended."""
        self._warmup.stepped()

    def _may_train(self) -> bool:
        match self.status.activity:
            case Activity.TRAINING:
                halt_if_ordered(self._agent.directive, self._fabric, self._arming)
                due = self._context.state.resync.is_due(self.status.epoch)
                broken = self._switch or self._parts.recovery.pending or self._fabric.poisoned
                return self.finishing or not (due or broken)
            case Activity.SHADOWING | Activity.IN_STEP:
                return self._following is not None and self._following.may_run
        return self._warmup.is_due(self.status.activity)

    def _switch_or_halt(self) -> None:
        """TRAINING: switch as was voted, or take note that the step broke, or begin an epoch."""
        if self._switch is not None:
            self._parts.leaving.carry_out(self._switch)
            self._arming.switched()
            self._switch = None
        elif self._context.state.resync.is_due(self.status.epoch) and not self._fabric.poisoned:
            self._context.state.resync.broadcast(self.status.epoch)
            self._context.state.local.placed()
        else:
            self._halt(undecided=False)

    # --- a broken step ----------------------------------------------------------------------------

    def _wait_for_outcome(self) -> bool:
        """Whether a rank has committed the step of a broken vote; Interrupted: it is not known."""
        if self._following is not None:
            return wait_for_outcome(self._parts.driver, self._agent, self._reporter)
        self._halt(undecided=True)
        # If the rank was given back instead, this worker must not continue the step.
        return self.status.activity is Activity.STUCK and self._parts.recovery.wait_for_outcome()

    def _halt(self, *, undecided: bool) -> None:
        self._arming.disarm()
        self._parts.sources.drop_all("the step broke")
        self._parts.recovery.halt(undecided=undecided)

    def obey(self, directive: Directive) -> None:
        """Agent's thread: the part of a directive that cannot wait for the main thread."""
        self._arming.obey(directive, self.status)
        halt_if_ordered(directive, self._fabric, self._arming)
        if self._known is not None:
            self._known.obey(directive)
