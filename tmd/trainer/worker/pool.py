"""A standby that waits for a rank."""

from __future__ import annotations

import logging

from tmd.core.planning.directives import Directive, Finish, Leave, Prepare, ShadowRank, Sync, Wait
from tmd.core.values.decode_errors import brief
from tmd.core.values.shadows import why_unfit
from tmd.fabric import Fabric
from tmd.trainer.session.hooks import dismiss
from tmd.trainer.state.roles import RebuildRequired
from tmd.trainer.state_transfer.carrier import StateTransfer
from tmd.trainer.worker.agent import Agent
from tmd.trainer.worker.rank_migration import RankMigration
from tmd.trainer.worker.recovery import Recovery
from tmd.trainer.worker.status_reporter import StatusReporter
from tmd.trainer.worker.warmup import Warmup

POOL_S = 1.0
"""How often a standby looks whether it is time to follow a rank again."""

log = logging.getLogger("tmd.trainer")


class Pool:
    """All calls come from the main thread."""

    def __init__(
        self,
        voice: StatusReporter,
        agent: Agent,
        carrier: StateTransfer,
        handover: RankMigration,
        recovery: Recovery,
    ) -> None:
        self._voice = voice
        self._agent = agent
        self._carrier = carrier
        self._handover = handover
        self._recovery = recovery

    def wait(self) -> None:
        """STANDBY: wait for a rank. Raises OtherRole."""
        shadowing = self._handover.shadowing

        def concerns(duty: Directive) -> bool:
            asks = isinstance(duty, Prepare | Sync | Leave | Finish)
            return asks or shadowing.wants(duty) or shadowing.is_over(duty)

        duty = self._agent.wait_a_while(concerns, POOL_S)
        match duty:
            case None:
                self._carrier.look_ahead()
                self._settle()
            case Wait():
                self._handover.to_pool()
            case ShadowRank():
                shadowing.study(duty)
            case Prepare():
                self._handover.prepare(duty)
            case Sync():
                if self._handover.replace(duty):
                    self._recovery.synced(duty, self._voice.status.timings["transfer"])
            case _:
                dismiss(duty)

    def become(self, other: RebuildRequired, warming: Warmup, fabric: Fabric) -> None:
        """Be built as another rank. What cannot be built for a rehearsal is not rehearsed, and
        this worker is built as it was before.

        Raises:
            Exception: the script's function fails, and it was no rehearsal.
            StateMismatch: it has not built again what was there, of which the state was to stay.
        """
        duty, before = self._agent.duty, self._carrier.roles.built
        # First: what was followed is mostly spoilt, and nothing is built in a spoilt step.
        self._handover.shadowing.let_go()
        size = self._voice.status.world_size
        try:
            warming.become(other, fabric, self._carrier, size)
            return
        except Exception as error:
            if not isinstance(duty, ShadowRank):
                raise
            log.exception("what rank %d is built as cannot be built here", other.rank)
            why = f"cannot be built as rank {other.rank} here: {brief(error)}"
        # Out of the handler, which would keep alive what was built by half.
        self._handover.shadowing.not_tried(duty, refusal=why)
        warming.become(RebuildRequired(before), fabric, self._carrier, size)

    def _settle(self) -> None:
        """With nothing to do, and no plan that may want this worker soon: be built as most are."""
        roles = self._carrier.roles
        if roles.commonest == roles.built or self._agent.duty != Wait():
            return
        other = roles.commonest
        if not why_unfit(self._voice.status.rehearsed, other, roles.of(other)):
            raise RebuildRequired(other)
