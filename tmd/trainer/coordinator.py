"""What a worker does between steps, by what it is doing and what it is told.

The main thread passes through two gates: :meth:`Coordinator.vote` before the optimizer, and
:meth:`Coordinator.boundary` before each batch. Both return only when the next thing to do is to
train. ``HANDLERS`` is the whole machine: one handler per activity, each of which waits for the
duty that ends it and returns.
Hazard: the agent's thread calls :meth:`obey`; it may poison, arm and disarm, and nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NoReturn

from torch import nn

from tmd.core.duties import Arm, Duty, Finish, Hold, Leave, Prepare, Resume, Sync, Train, Wait
from tmd.core.errors import LinkError
from tmd.core.model import Activity, WorkerStatus
from tmd.fabric import Fabric
from tmd.trainer.agent import Agent
from tmd.trainer.arming import Arming
from tmd.trainer.ballot import CLOSING, STEPPING, agree
from tmd.trainer.carrier import Carrier
from tmd.trainer.data import Feed
from tmd.trainer.gate import Interrupted, Outcome
from tmd.trainer.handover import Handover, rest
from tmd.trainer.local import LocalState
from tmd.trainer.state import Registry
from tmd.trainer.voice import Voice

SHADOW_STEPS = 2
"""Shadow iterations of a standby: the first builds what is lazy, the second has final buckets."""

log = logging.getLogger("tmd.trainer")


class Coordinator:
    """The gate of a managed job. Owns fabric and agent from :meth:`start` on."""

    _agent: Agent
    _fabric: Fabric

    def __init__(self, status: WorkerStatus) -> None:
        self._voice = Voice(status)
        self._arming = Arming(self._voice.tell_armed)
        self._switch: Arm | None = None
        self._synced_for: Sync | None = None
        self._resolved: Sync | Finish | Wait | None = None
        self._finishing = False
        self._shadow_steps = 0
        self._carrier: Carrier | None = None
        self._handover: Handover | None = None

    # --- setting up -------------------------------------------------------------------------------

    def start(self, agent: Agent, fabric: Fabric, *, restarted: bool) -> None:
        """Wait for a role. A standby gets neutral groups, an active worker its rank.

        A worker that was ``restarted`` leaves if the job has finished meanwhile; one that was
        started for the first time waits for the job to be run again.
        """
        self._agent, self._fabric = agent, fabric
        self._voice.open(agent, fabric)
        duty = agent.wait_until(
            lambda d: isinstance(d, Train | Wait) or (restarted and d == Leave())
        )
        if isinstance(duty, Leave):
            self._dismiss(duty)
        if isinstance(duty, Train):
            self._fabric.enter(duty.membership, duty.rank)
            self._voice.say(Activity.TRAINING, rank=duty.rank, epoch=duty.membership.epoch)
        else:
            rest(self._fabric, self.status.world_size)

    def registered(self, registry: Registry, wrapped: list[nn.Module], local: LocalState) -> None:
        """The script has named its state: from here on it can be moved."""
        carrier = Carrier(self._fabric, registry, wrapped, local)
        self._handover = Handover(self._voice, self._agent, self._fabric, carrier)
        self._carrier = carrier

    def seeds(self, own: int) -> tuple[int, ...]:
        """Base seeds of all ranks; a joiner has them from its source."""
        carrier = self._carrier
        assert carrier is not None
        if not carrier.seeds:
            carrier.seeds = self._gather(own)
        return carrier.seeds

    def follow(self, feed: Feed) -> None:
        """``feed`` is the one that positions refer to from now on."""
        assert self._carrier is not None
        self._carrier.feed = feed

    def _gather(self, own: int) -> tuple[int, ...]:
        size = self.status.world_size
        if self.shadowing:
            return (own,) * size
        mine = [2**63 - 1] * size
        mine[self._fabric.rank or 0] = own
        try:
            return self._fabric.reduce_min(mine)
        except LinkError as error:
            raise RuntimeError(
                f"a rank was lost while the job was being set up ({error}); start it again"
            ) from error

    # --- the two gates ----------------------------------------------------------------------------

    def vote(self, local: LocalState) -> Outcome:
        """Before the optimizer: learn whether this step counts.

        Raises:
            Interrupted: it does not, and must be run again.
        """
        if self.status.activity is not Activity.TRAINING:
            return Outcome.SHADOW
        if self._fabric.poisoned:
            raise Interrupted
        status = self.status
        try:
            local.lay_away(status.step, status.rank or 0, status.world_size, self._fabric.shift)
        except LinkError:
            raise Interrupted from None
        armed = self._arming.begin_vote()
        try:
            epoch = agree(self._fabric, self.status.step, armed, STEPPING)
        except LinkError:
            self._arming.end_vote(0)
            return self._undecided()
        self._switch = self._arming.end_vote(epoch)
        return Outcome.COMMIT

    def boundary(self) -> None:
        """Before a batch: do all that can only be done between two steps.

        Raises:
            SystemExit: this worker is not needed any more.
            WalkOn: the joiner's data position is in a later ``batches()`` call.
        """
        while not self._may_train():
            HANDLERS[self.status.activity](self)

    def close_feed(self, feed: Feed) -> bool:
        """At the end of a ``batches()`` call: wait until every rank has committed its last step.

        Voted and counted like a step of its own, so that after a loss it is known for all whether
        the call is over. Returns False if it has to be asked again.
        """
        if self.status.activity is not Activity.TRAINING or self._finishing:
            return True
        try:
            agree(self._fabric, self.status.step, 0, CLOSING)
        except LinkError:
            try:
                self._undecided()
            except Interrupted:
                return self._finishing
        feed.close()
        self._voice.say(step=self.status.step + 1, undecided=False, now=False)
        return True

    # --- what others may ask ----------------------------------------------------------------------

    @property
    def _handing(self) -> Handover:
        assert self._handover is not None, "session.register() comes first"
        return self._handover

    @property
    def status(self) -> WorkerStatus:
        return self._voice.status

    def current(self) -> WorkerStatus:
        """The status with what is measured at this moment."""
        return self._voice.current()

    @property
    def poisoned(self) -> bool:
        """Whether the present step is spoilt."""
        return self.status.activity is Activity.TRAINING and self._fabric.poisoned

    @property
    def finishing(self) -> bool:
        """Whether another rank has come to the end of training."""
        return self._finishing

    @property
    def shadowing(self) -> bool:
        """Whether what runs now counts for nothing."""
        return self.status.activity in (Activity.STARTING, Activity.STANDBY)

    def committed(self, local: LocalState, loss: float | None, seconds: float) -> None:
        """The step is over and counts."""
        at = self.status.step + 1
        self._voice.say(step=at, undecided=False, holds=local.ranks_held(at), now=False)
        self._voice.say(loss=loss, step_seconds=seconds, now=False)

    def exhausted(self) -> None:
        """The loader of a standby is too short for all shadow iterations."""
        self._shadow_steps = SHADOW_STEPS

    def shadowed(self) -> None:
        """A shadow iteration is over."""
        self._shadow_steps += 1

    # --- handlers: one per activity ---------------------------------------------------------------

    def _may_train(self) -> bool:
        match self.status.activity:
            case Activity.TRAINING:
                return self._finishing or not (
                    self._switch or self._resolved or self._fabric.poisoned
                )
            case Activity.STARTING:
                return self._shadow_steps < SHADOW_STEPS
        return False

    def _started(self) -> None:
        """STARTING: the shadow iterations are done."""
        self._handing.to_pool()

    def _at_boundary(self) -> None:
        """TRAINING: carry out the switch that was voted, or take note that the step broke."""
        if self._switch is not None:
            self._carry_out(self._switch)
            self._switch = None
        else:
            self._halt(undecided=False)

    def _carry_out(self, order: Arm) -> None:
        rank = order.membership.rank_of(self.status.worker)
        if rank is not None:
            self._fabric.switch(order.membership, rank)
            self._voice.say(epoch=order.membership.epoch, armed=0, plan="")
            return
        self._fabric.switch(order.membership, None)
        self._voice.say(Activity.LEFT, armed=0, plan=order.plan)
        move = next(m for m in order.moves if m.leaver.worker == self.status.worker)
        self._handing.send(order, move)

    def _left(self) -> None:
        """LEFT: keep the state until the joiner has committed, or take the rank back."""
        duty = self._agent.wait_until(lambda d: isinstance(d, Wait | Hold | Finish | Leave))
        if isinstance(duty, Hold):
            self._voice.say(Activity.STUCK, plan=duty.plan, undecided=False)
        elif isinstance(duty, Wait):
            self._handing.to_pool()
        else:
            self._dismiss(duty)

    def _stuck(self) -> None:
        """STUCK: wait until the resume step is known, and be ready for it."""
        duty = self._resolved or self._decision()
        self._resolved = None
        if isinstance(duty, Wait):
            # Another worker holds this rank in a later epoch.
            self._handing.to_pool()
            return
        if isinstance(duty, Finish):
            self._finishing = True
            self._voice.say(Activity.TRAINING, plan="")
            return
        started = time.monotonic()
        for move in duty.moves:
            if move.source is not None and move.source.worker == self.status.worker:
                self._handing.send(duty, move)
        self._say_synced(duty, time.monotonic() - started)

    def _synced(self) -> None:
        """SYNCED: wait for the others."""
        duty = self._agent.wait_until(self._concerns_synced)
        match duty:
            case Resume() | Train():
                self._fabric.enter(duty.membership, duty.rank)
                self._voice.say(
                    Activity.TRAINING,
                    rank=duty.rank,
                    epoch=duty.membership.epoch,
                    suspects=(),
                    timings=self.status.timings,
                )
            case Hold() | Sync():
                self._voice.say(Activity.STUCK, plan=duty.plan)
            case Wait():
                self._handing.to_pool()
            case _:
                self._dismiss(duty)

    def _parked(self) -> None:
        """STANDBY: wait for a rank."""
        duty = self._agent.wait_until(lambda d: isinstance(d, Prepare | Sync | Leave | Finish))
        match duty:
            case Prepare():
                self._handing.prepare(duty)
            case Sync():
                if self._handing.replace(duty):
                    self._say_synced(duty, self.status.timings["transfer"])
            case _:
                self._dismiss(duty)

    def _prepared(self) -> None:
        """PREPARED: identity taken, links open; the state comes with the switch."""
        self._handing.take_over()

    def _refused(self) -> None:
        """REFUSED: wait until the plan is dropped."""
        plan = self.status.plan
        self._agent.wait_until(lambda d: not isinstance(d, Prepare | Sync) or d.plan != plan)
        self._handing.to_pool()

    # --- losing and finding the step --------------------------------------------------------------

    def _undecided(self) -> Outcome:
        """The vote broke: this rank's gradients are whole, but did anybody commit?"""
        self._halt(undecided=True)
        duty = self._decision()
        self._resolved = duty
        if isinstance(duty, Finish) or (
            isinstance(duty, Sync) and duty.resume == self.status.step + 1
        ):
            return Outcome.COMMIT
        raise Interrupted

    def _halt(self, *, undecided: bool) -> None:
        self._arming.disarm()
        log.warning("step %d broke: %s", self.status.step, self._fabric.poison_reason)
        self._voice.say(
            Activity.STUCK, undecided=undecided, suspects=self._fabric.suspects, plan="", armed=0
        )

    def _decision(self) -> Sync | Finish | Wait:
        """Wait for the resume step; say again that this worker is halted to each plan that asks."""
        while True:
            duty = self._agent.wait_until(
                lambda d: (
                    isinstance(d, Sync | Finish | Leave | Wait)
                    or (isinstance(d, Hold) and d.plan != self.status.plan)
                )
            )
            match duty:
                case Hold():
                    self._voice.say(plan=duty.plan)
                case Sync() | Finish() | Wait():
                    return duty
                case _:
                    self._dismiss(duty)

    # --- saying and obeying -----------------------------------------------------------------------

    def _say_synced(self, duty: Sync, seconds: float) -> None:
        self._synced_for = duty
        timings = {**self.status.timings, "sync": seconds}
        self._voice.say(Activity.SYNCED, plan=duty.plan, undecided=False, timings=timings)

    def obey(self, duty: Duty) -> None:
        """Agent's thread: the part of a duty that cannot wait for the main thread."""
        match duty:
            case Arm() if duty.membership.epoch > self.status.epoch:
                if self.status.activity is Activity.TRAINING:
                    self._arming.arm(duty)
            case Hold() if self._fabric.membership and duty.epoch <= self._fabric.membership.epoch:
                self._arming.disarm()
                self._fabric.poison(f"plan {duty.plan} asks to halt")
            case Train():
                self._arming.disarm(duty.dropped)
            case Wait():
                self._arming.disarm()
            case _:
                pass
        if self._carrier is not None:
            self._carrier.cancel_unless(duty)

    def _concerns_synced(self, duty: Duty) -> bool:
        match duty:
            case Sync():
                return duty != self._synced_for
            case Train():
                return duty.membership.epoch > self.status.epoch
        return isinstance(duty, Resume | Hold | Wait | Leave | Finish)

    def _dismiss(self, duty: Duty) -> NoReturn:
        detail = duty.detail if isinstance(duty, Leave) else ""
        if detail:
            log.warning("dismissed: %s", detail)
        raise SystemExit(duty.code if isinstance(duty, Leave) else 0)


HANDLERS: dict[Activity, Callable[[Coordinator], None]] = {
    Activity.STARTING: Coordinator._started,
    Activity.STANDBY: Coordinator._parked,
    Activity.PREPARED: Coordinator._prepared,
    Activity.REFUSED: Coordinator._refused,
    Activity.TRAINING: Coordinator._at_boundary,
    Activity.STUCK: Coordinator._stuck,
    Activity.SYNCED: Coordinator._synced,
    Activity.LEFT: Coordinator._left,
}
