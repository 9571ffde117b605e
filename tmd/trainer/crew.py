"""The parts of a worker whose state is known, put together."""

from __future__ import annotations

import logging
from typing import NamedTuple

from torch import nn

from tmd.core.limits import ShadowLimits
from tmd.fabric import Fabric
from tmd.trainer.agent import Agent
from tmd.trainer.carrier import Carrier
from tmd.trainer.handover import Handover
from tmd.trainer.leaving import Leaving
from tmd.trainer.local import LocalState
from tmd.trainer.mirrors import Mirrors
from tmd.trainer.pool import Pool
from tmd.trainer.recovery import Recovery
from tmd.trainer.replicas import Partition
from tmd.trainer.snapshots import Snapshots
from tmd.trainer.state import Registry
from tmd.trainer.units import Units
from tmd.trainer.voice import Voice
from tmd.trainer.window import Window

log = logging.getLogger("tmd.trainer")


class Crew(NamedTuple):
    """Who does what once the script has named its state."""

    carrier: Carrier
    snapshots: Snapshots
    mirrors: Mirrors
    handover: Handover
    recovery: Recovery
    leaving: Leaving
    pool: Pool

    def close(self) -> None:
        """The process ends: no thread of ours may be inside torch then."""
        # Others wait for its verdicts, and those for digests.
        self.carrier.early.close()
        self.carrier.proving.close()
        self.mirrors.close()
        self.snapshots.close()
        if self.handover.shadowing.following is not None:
            self.handover.shadowing.following.shadow.end()


def crew_of(
    voice: Voice,
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
) -> Crew:
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
    carrier = Carrier(fabric, registry, units, wrapped, local, several=several)
    carrier.roles.built = fabric.rank or 0
    if not alone:
        # Before any door is opened: who comes in is told groups and roles.
        carrier.introduce(alike)
    keeping = Snapshots(fabric, carrier, units, window, limits, snapshots, voice.tell_kept)
    handover = Handover(voice, agent, fabric, carrier, units, limits, keeping)
    mirrors = Mirrors(fabric, carrier, units, window, limits)
    recovery = Recovery(voice, agent, fabric, carrier, handover, keeping)
    return Crew(
        carrier,
        keeping,
        mirrors,
        handover,
        recovery,
        Leaving(voice, agent, fabric, handover, mirrors, keeping),
        Pool(voice, agent, carrier, handover, recovery),
    )
