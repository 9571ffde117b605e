"""A switch that was voted: this worker goes on in the new epoch, or gives its rank away."""

from __future__ import annotations

from tmd.core.planning.directives import Arm, Finish, Hold, Leave, Wait
from tmd.core.values.model import Activity, Rehearsal
from tmd.fabric import Fabric
from tmd.trainer.session.hooks import dismiss
from tmd.trainer.shadow.sources import ShadowSources
from tmd.trainer.snapshots.snapshots import Snapshots
from tmd.trainer.worker.agent import Agent
from tmd.trainer.worker.rank_migration import RankMigration
from tmd.trainer.worker.status_reporter import StatusReporter


class Leaving:
    """All calls come from the main thread."""

    def __init__(
        self,
        voice: StatusReporter,
        agent: Agent,
        fabric: Fabric,
        handover: RankMigration,
        mirrors: ShadowSources,
        snapshots: Snapshots,
    ) -> None:
        self._voice = voice
        self._agent = agent
        self._fabric = fabric
        self._handover = handover
        self._mirrors = mirrors
        self._snapshots = snapshots

    def carry_out(self, order: Arm) -> None:
        """At the boundary after the vote."""
        rank = order.membership.rank_of(self._voice.status.worker)
        if rank is not None:
            self._fabric.switch(order.membership, rank)
            self._voice.say(epoch=order.membership.epoch, armed=0, plan="")
            return
        self._snapshots.give_up()
        self._fabric.switch(order.membership, None)
        self._voice.say(Activity.LEFT, armed=0, plan=order.plan)
        if self._mirrors.taken(order.plan, lambda: self._agent.duty != order):
            self._voice.say(timings=self._mirrors.spent())
        else:
            self._handover.send(order, order.move_of(self._voice.status.worker))

    def wait(self) -> None:
        """LEFT: keep the state until the joiner has committed, or take the rank back."""
        duty = self._agent.wait_until(lambda d: isinstance(d, Wait | Hold | Finish | Leave))
        if isinstance(duty, Hold):
            self._voice.say(Activity.STUCK, plan=duty.plan, undecided=False)
        elif isinstance(duty, Wait):
            # Who held a rank until now has shown that it computes the bits.
            status = self._voice.status
            if status.rank is not None:
                self._voice.tell_rehearsed(status.rank, Rehearsal(status.step, 0.0))
            self._snapshots.forget()
            self._handover.to_pool()
        else:
            dismiss(duty)
