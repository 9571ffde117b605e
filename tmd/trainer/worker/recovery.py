"""What a survivor does from the moment its step broke until all run on together."""

from __future__ import annotations

import logging
import time

from tmd.core.planning.directives import (
    Directive,
    Finish,
    Hold,
    HoldState,
    Leave,
    Resume,
    Sync,
    Train,
    Wait,
)
from tmd.core.planning.failover import keepers_first
from tmd.core.values.model import Activity
from tmd.fabric import Fabric
from tmd.trainer.session.hooks import dismiss
from tmd.trainer.snapshots.snapshots import Snapshots
from tmd.trainer.state_transfer.carrier import StateTransfer
from tmd.trainer.worker.agent import Agent
from tmd.trainer.worker.rank_migration import RankMigration
from tmd.trainer.worker.status_reporter import StatusReporter

CALL_S = 0.5
"""For a link that is opened ahead: whoever is slower will be waited for in the step."""

log = logging.getLogger("tmd.trainer")


class Recovery:
    """All calls come from the main thread, but for :meth:`heed`."""

    def __init__(
        self,
        voice: StatusReporter,
        agent: Agent,
        fabric: Fabric,
        carrier: StateTransfer,
        handover: RankMigration,
        snapshots: Snapshots,
    ) -> None:
        self._voice = voice
        self._agent = agent
        self._fabric = fabric
        self._carrier = carrier
        self._handover = handover
        self._snapshots = snapshots
        self._synced_for: Sync | None = None
        self._resolved: Sync | Finish | Wait | None = None
        self.finishing = False
        """Whether another rank has come to the end of training."""

    @property
    def pending(self) -> bool:
        """Whether a decision was heard that is still to be carried out at the next boundary."""
        return self._resolved is not None

    def halt(self, *, undecided: bool) -> None:
        """Say that the step broke, and whether complete gradients are at hand."""
        # First of all: what is told of copies must not change any more.
        self._snapshots.give_up()
        log.warning("step %d broke: %s", self._voice.status.step, self._fabric.poison_reason)
        if self._gave_back():
            return
        self._voice.say(
            Activity.STUCK, undecided=undecided, suspects=self._fabric.suspects, plan="", armed=0
        )
        self._carrier.early.stand(self._voice.status.step)
        self.heed(self._agent.duty)

    def _gave_back(self) -> bool:
        """Whether the state was only believed to be that of the rank, which nobody holds now."""
        why = self._carrier.proving.verdict()
        if why:
            log.warning("rank %s is given back: %s", self._voice.status.rank, why)
            self._handover.to_pool()
        return bool(why)

    def heed(self, duty: Directive | None) -> None:
        """Begin with the digest if this worker is the one that is asked for it, as a rule (any
        thread)."""
        if not isinstance(duty, Hold):
            return
        status = self._voice.status
        for lost in duty.hot:
            alike = set(self._voice.alike(lost)) - set(duty.hot)
            asked = (r for r in keepers_first(lost, status.world_size) if r in alike)
            if status.rank is not None and status.rank == next(asked, None):
                self._carrier.early.begin()

    def rolls_forward(self) -> bool:
        """After a vote that broke: whether somebody committed, so that this rank must, too."""
        duty = self._decision()
        self._resolved = duty
        return isinstance(duty, Finish) or (
            isinstance(duty, Sync) and duty.resume == self._voice.status.step + 1
        )

    def settle(self) -> None:
        """STUCK: wait until the resume step is known, and be ready for it. Raises OtherRole."""
        duty = self._resolved or self._decision()
        self._resolved = None
        if isinstance(duty, Wait):
            # Another worker holds this rank in a later epoch.
            self._handover.to_pool()
            return
        if isinstance(duty, Finish):
            self.finishing = True
            self._voice.say(Activity.TRAINING, plan="")
            return
        self._snapshots.only(duty.whole)
        if self._is_joiner(duty):
            self._handover.to_pool()
            return
        self._carrier.start_over(duty, survives=not duty.back)
        started = time.monotonic()
        if duty.back:
            # Copies for others are given out by a thread of their own.
            self._snapshots.put_back(duty)
            self._voice.say(step=duty.resume, holds=(), now=False)
        else:
            self._send(duty)
        self.synced(duty, time.monotonic() - started)

    def _send(self, duty: Sync) -> None:
        for move in duty.moves:
            if move.source is not None and move.source.worker == self._voice.status.worker:
                self._handover.send(duty, move)

    def synced(self, duty: Sync, seconds: float) -> None:
        """Say that this worker is ready for the resume step."""
        self._synced_for = duty
        timings = {**self._voice.status.timings, "sync": seconds}
        self._voice.say(Activity.SYNCED, plan=duty.plan, undecided=False, timings=timings)
        # Others still copy; otherwise the first step would open the links one by one.
        self._fabric.call_ahead(
            duty.membership, duty.rank, timeout=CALL_S, cancel=lambda: self._agent.duty != duty
        )

    def rejoin(self) -> None:
        """SYNCED: wait for the others, then run on in the new epoch."""
        duty = self._agent.wait_until(self._concerns_synced)
        match duty:
            case Resume() | Train():
                if not self._carrier.proving.running:
                    self._carrier.early.forget()
                self._fabric.enter(duty.membership, duty.rank)
                self._voice.say(
                    Activity.TRAINING,
                    rank=duty.rank,
                    epoch=duty.membership.epoch,
                    suspects=(),
                    timings=self._voice.status.timings,
                )
            case Sync() if self._is_joiner(duty):
                self._handover.to_pool()
            case Hold() | Sync():
                if not self._gave_back():
                    self._voice.say(Activity.STUCK, plan=duty.plan)
            case Wait() | HoldState():
                # The plan is made anew, and this worker is as good as any.
                self._handover.to_pool()
            case _:
                dismiss(duty)

    def _is_joiner(self, duty: Sync) -> bool:
        """Whether a source will send the state to this worker, whatever it has already.

        The plan was rewritten before the leader heard that this joiner was ready.
        """
        joiners = [m.joiner for m in duty.moves if m.source is not None]
        return any(j is not None and j.worker == self._voice.status.worker for j in joiners)

    def _decision(self) -> Sync | Finish | Wait:
        """Wait for the resume step; say again that this worker is halted to each plan that asks."""
        while True:
            duty = self._agent.wait_until(
                lambda d: (
                    isinstance(d, Sync | Finish | Leave | Wait)
                    or (isinstance(d, Hold) and d.plan != self._voice.status.plan)
                )
            )
            match duty:
                case Hold():
                    self._voice.say(plan=duty.plan)
                case Sync() | Finish() | Wait():
                    return duty
                case _:
                    dismiss(duty)

    def _concerns_synced(self, duty: Directive) -> bool:
        match duty:
            case Sync():
                return duty != self._synced_for
            case Train():
                return duty.membership.epoch > self._voice.status.epoch
        return isinstance(duty, Resume | Hold | Wait | HoldState | Leave | Finish)
