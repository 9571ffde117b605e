"""The parts of a worker whose state is known, put together."""

from __future__ import annotations

import logging
from typing import NamedTuple

from torch import nn

from tmd.core.values.limits import ShadowLimits
from tmd.fabric import Fabric
from tmd.trainer.shadow.sources import ShadowSources
from tmd.trainer.snapshots.snapshots import Snapshots
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.replicas import Partition
from tmd.trainer.state.state import Registry
from tmd.trainer.state.units import Units
from tmd.trainer.state.window import Window
from tmd.trainer.state_transfer.carrier import StateTransfer
from tmd.trainer.worker.agent import Agent
from tmd.trainer.worker.leaving import Leaving
from tmd.trainer.worker.pool import Pool
from tmd.trainer.worker.rank_migration import RankMigration
from tmd.trainer.worker.recovery import Recovery
from tmd.trainer.worker.status_reporter import StatusReporter

log = logging.getLogger("tmd.trainer")


class WorkerParts(NamedTuple):
    """Who does what once the script has named its state."""

    transfer: StateTransfer
    snapshots: Snapshots
    mirrors: ShadowSources
    migration: RankMigration
    recovery: Recovery
    leaving: Leaving
    pool: Pool

    def close(self) -> None:
        """The process ends: no thread of ours may be inside torch then."""
        # Others wait for its verdicts, and those for digests.
        self.transfer.early.close()
        self.transfer.verification.close()
        self.mirrors.close()
        self.snapshots.close()
        if self.migration.shadowing.following is not None:
            self.migration.shadowing.following.shadow.end()


def assemble(
    reporter: StatusReporter,
    agent: Agent,
    fabric: Fabric,
    limits: ShadowLimits,
    registry: Registry,
    wrapped: list[nn.Module],
    local: LocalState,
    snapshots: int,
    *,
    alike: Partition,
    alone: bool,
    several: bool,
) -> WorkerParts:
    """For what a script has registered; ``snapshots``: steps between two, 0 for none.

    ``several``: the script can build other roles, too.

    Raises:
        RuntimeError: a rank was lost; who is ``alone``, a standby, does not speak to others.
    """
    if registry.divided and not several and fabric.rank == 0:
        log.warning(
            "a ZeroRedundancyOptimizer keeps another part on each rank: a standby can only take "
            "the rank as which it was built, the last one, unless session.build(function) builds "
            "model and optimizer"
        )
    units, window = Units(registry), Window()
    transfer = StateTransfer(fabric, registry, units, wrapped, local, several=several)
    transfer.roles.built = fabric.rank or 0
    if not alone:
        # Before any door is opened: who comes in is told groups and roles.
        transfer.introduce(alike)
    keeping = Snapshots(fabric, transfer, units, window, limits, snapshots, reporter.tell_kept)
    migration = RankMigration(reporter, agent, fabric, transfer, units, limits, keeping)
    mirrors = ShadowSources(fabric, transfer, units, window, limits)
    recovery = Recovery(reporter, agent, fabric, transfer, migration, keeping)
    return WorkerParts(
        transfer,
        keeping,
        mirrors,
        migration,
        recovery,
        Leaving(reporter, agent, fabric, migration, mirrors, keeping),
        Pool(reporter, agent, transfer, migration, recovery),
    )
