"""Carries out a switch that was voted: enter the new epoch, or hand over the rank."""

from __future__ import annotations

from tmd.core.planning.directives import Arm, Hold
from tmd.core.values.model import Rehearsal
from tmd.core.worker.responses import Response
from tmd.core.worker.transitions import WorkerTransition
from tmd.fabric import Fabric
from tmd.trainer.shadow.sources import ShadowSources
from tmd.trainer.snapshots.snapshots import Snapshots
from tmd.trainer.worker.agent import Agent
from tmd.trainer.worker.rank_migration import RankMigration
from tmd.trainer.worker.status_reporter import StatusReporter


class Leaving:
    """All calls come from the main thread."""

    def __init__(
        self,
        reporter: StatusReporter,
        agent: Agent,
        fabric: Fabric,
        migration: RankMigration,
        sources: ShadowSources,
        snapshots: Snapshots,
    ) -> None:
        self._reporter = reporter
        self._agent = agent
        self._fabric = fabric
        self._migration = migration
        self._sources = sources
        self._snapshots = snapshots

    def carry_out(self, order: Arm) -> None:
        """Called at the boundary after the vote."""
        rank = order.membership.rank_of(self._reporter.status.worker)
        self._sources.hand_over(order.plan, self._reporter.status.step)
        if rank is not None:
            grows = self._fabric.passes.shrunk
            self._fabric.switch(order.membership, rank)
            if grows:  # the joiner that has followed this worker takes a rank that was adopted
                self._sources.release(order.plan)
            self._reporter.update(epoch=order.membership.epoch, armed=0, plan="")
            return
        self._snapshots.give_up()
        self._fabric.switch(order.membership, None)
        self._reporter.update(WorkerTransition.GAVE_AWAY, armed=0, plan=order.plan)
        if self._sources.taken(order.plan, lambda: self._agent.directive != order):
            self._reporter.update(timings=self._sources.spent())
        else:
            self._migration.send(order, order.move_of(self._reporter.status.worker))

    def wait(self) -> None:
        """LEFT: keep the state until the joiner has committed, or take back the rank."""
        response, directive = self._reporter.next_response()
        match response, directive:
            case Response.HALT, Hold(plan=plan):
                self._reporter.update(WorkerTransition.HALTED, plan=plan, undecided=False)
            case Response.STAND_BY, _:
                # This worker has computed the rank's bits in training.
                status = self._reporter.status
                if status.rank is not None:
                    self._reporter.report_rehearsal(status.rank, Rehearsal(status.step, 0.0))
                self._snapshots.forget()
                # Before it reports that it stands by: its host may be switched off then.
                self._migration.hand_over()
                self._migration.to_pool()
            case _:
                self._migration.leave(directive)
