"""A standby that waits for a rank."""

from __future__ import annotations

from tmd.core.duties import Duty, Finish, Follow, Leave, Prepare, Sync, Wait
from tmd.trainer.agent import Agent
from tmd.trainer.carrier import Carrier
from tmd.trainer.gate import dismiss
from tmd.trainer.handover import Handover
from tmd.trainer.recovery import Recovery
from tmd.trainer.roles import OtherRole
from tmd.trainer.voice import Voice

POOL_S = 1.0
"""How often a standby looks whether it is time to follow a rank again."""


class Pool:
    """All calls come from the main thread."""

    def __init__(
        self, voice: Voice, agent: Agent, carrier: Carrier, handover: Handover, recovery: Recovery
    ) -> None:
        self._voice = voice
        self._agent = agent
        self._carrier = carrier
        self._handover = handover
        self._recovery = recovery

    def wait(self) -> None:
        """STANDBY: wait for a rank. Raises OtherRole."""
        shadowing = self._handover.shadowing

        def concerns(duty: Duty) -> bool:
            asks = isinstance(duty, Prepare | Sync | Leave | Finish)
            return asks or shadowing.wants(duty) or shadowing.is_over(duty)

        duty = self._agent.wait_a_while(concerns, POOL_S)
        match duty:
            case None:
                self._settle()
            case Wait():
                self._handover.to_pool()
            case Follow():
                shadowing.study(duty)
            case Prepare():
                self._handover.prepare(duty)
            case Sync():
                if self._handover.replace(duty):
                    self._recovery.synced(duty, self._voice.status.timings["transfer"])
            case _:
                dismiss(duty)

    def _settle(self) -> None:
        """With nothing to do, and no plan that may want this worker soon: be built as most are."""
        roles = self._carrier.roles
        if roles.commonest != roles.built and self._agent.duty == Wait():
            raise OtherRole(roles.commonest)
