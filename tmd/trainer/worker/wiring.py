"""Assembles the parts of a worker whose state is registered."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tmd.core.planning.directives import Directive
from tmd.core.values.model import Activity
from tmd.trainer.session.handovers import Handovers
from tmd.trainer.shadow.sources import ShadowSources
from tmd.trainer.snapshots.snapshots import Snapshots
from tmd.trainer.state.data import Feed
from tmd.trainer.state.replicas import Partition
from tmd.trainer.state_transfer.context import RankContext
from tmd.trainer.state_transfer.obstacle import Obstacle
from tmd.trainer.worker.agent import Agent
from tmd.trainer.worker.continuation import Continuation, FinishingParts
from tmd.trainer.worker.leaving import Leaving
from tmd.trainer.worker.pool import Pool
from tmd.trainer.worker.rank_migration import RankMigration
from tmd.trainer.worker.recovery import Recovery
from tmd.trainer.worker.shadow_driver import ShadowDriver
from tmd.trainer.worker.status_reporter import StatusReporter

log = logging.getLogger("tmd.trainer")


class WorkerParts(NamedTuple):
    """The parts that carry out directives once the script has registered its state."""

    context: RankContext
    snapshots: Snapshots
    sources: ShadowSources
    migration: RankMigration
    driver: ShadowDriver
    recovery: Recovery
    leaving: Leaving
    pool: Pool
    continuation: Continuation

    def act(self, activity: Activity) -> Obstacle | None:
        """Between two steps: do the work of an activity other than TRAINING, or wait until it ends.

        Returns an obstacle, if any; the activity does not change until the obstacle is removed.

        Raises:
            SystemExit: this worker is no longer needed.
        """
        match activity:
            case Activity.STARTING:
                self.migration.to_pool()
            case Activity.STANDBY:
                return self.pool.wait()
            case Activity.SHADOWING | Activity.IN_STEP:
                return self.migration.follow()
            case Activity.PREPARED:
                return self.migration.take_over()
            case Activity.REFUSED:
                self.migration.await_other_plan()
            case Activity.STUCK:
                return self.recovery.settle()
            case Activity.SYNCED:
                self.recovery.rejoin()
            case Activity.LEFT:
                self.leaving.wait()
        return None

    def begin_step(self, *, trains: bool) -> None:
        """The script begins to compute a step, in which an optimizer runs if it ``trains``."""
        self.migration.begun(trains=trains)
        self.sources.begin_step(trains=trains)
        self.continuation.begin_step(trains=trains)

    def at_boundary(self, step: int) -> None:
        """This worker holds a rank, and its ``step`` begins."""
        self.sources.at_boundary(step)
        self.snapshots.at_boundary(step)

    def obey(self, directive: Directive) -> None:
        """Agent's thread: the part of a directive that cannot wait for the main thread."""
        self.recovery.digest_early(directive)
        self.migration.cancel_unless(directive)

    def left_loop(self, feed: Feed) -> None:
        """The script has left its loop over ``feed``. It may change parameters before the next
        step, and do what cannot be repeated: this worker does not roll back to before."""
        self.sources.close_feed()
        self.migration.begun(trains=False)
        self.snapshots.call_over(feed.call + 1)

    def close(self) -> None:
        """Stop all threads, since none may be inside torch when the process ends."""
        self.continuation.close()
        # Digests end before the verdicts that wait for them.
        self.context.state.early.close()
        self.context.verification.close()
        self.sources.close()
        self.snapshots.close()
        self.driver.close()


def assemble(
    reporter: StatusReporter,
    agent: Agent,
    context: RankContext,
    *,
    snapshot_every: int,
    alike: Partition,
    alone: bool,
    handovers: Handovers,
    halt: Callable[[], None],
) -> WorkerParts:
    """The parts of a worker. ``snapshot_every``: steps, 0 for no snapshots.

    ``alone``: this worker holds no rank yet and does not connect to others. ``halt`` reports that
    the step of this worker's rank broke.

    Raises:
        RuntimeError: a rank was lost.
    """
    fit, fabric = context.fit, context.fabric
    if context.units.divided and not fit.roles.several and fabric.rank == 0:
        log.warning(
            "a ZeroRedundancyOptimizer keeps a different part on each rank: build model and "
            "optimizer in session.build(function). Otherwise a standby can take only the last "
            "rank, for which it is built"
        )
    if not alone:
        # Before any server thread starts, since those send groups and roles to peers.
        fit.introduce(alike)
    snapshots = Snapshots(context, snapshot_every, reporter.report_snapshots)
    hand_over = partial(handovers.run, lambda detail: reporter.update(detail=detail))
    migration = RankMigration(reporter, agent, context, snapshots, hand_over)
    sources = ShadowSources(context)
    recovery = Recovery(reporter, agent, context, migration, snapshots)
    finishing = FinishingParts(sources, snapshots, migration.driver, recovery)
    return WorkerParts(
        context,
        snapshots,
        sources,
        migration,
        migration.driver,
        recovery,
        Leaving(reporter, agent, fabric, migration, sources, snapshots),
        Pool(reporter, agent, context, migration, recovery),
        Continuation(reporter, agent, context, finishing, halt),
    )
