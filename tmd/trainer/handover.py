"""The two sides of a rank changing hands, in the words of a worker's status.

What is carried and how is :mod:`tmd.trainer.carrier`'s business; here is what this worker says
meanwhile, and what becomes of it when the other side fails.
"""

from __future__ import annotations

import logging
import time

from tmd.core.duties import Arm, Prepare, Sync
from tmd.core.errors import LinkError, StateMismatch
from tmd.core.model import Activity, Move
from tmd.fabric import Fabric, Neutral
from tmd.trainer.agent import Agent
from tmd.trainer.carrier import Carrier
from tmd.trainer.takeover import Takeover
from tmd.trainer.voice import Voice

PREPARE_TIMEOUT_S = 30.0

log = logging.getLogger("tmd.trainer")


def rest(fabric: Fabric, size: int) -> None:
    """Hold no rank: neutral groups that report the last rank; scripts print and save on rank 0."""
    fabric.sandbox(Neutral(), size - 1, size)


class Handover:
    """All calls come from the main thread."""

    def __init__(self, voice: Voice, agent: Agent, fabric: Fabric, carrier: Carrier) -> None:
        self._voice = voice
        self._agent = agent
        self._fabric = fabric
        self._carrier = carrier
        self._takeover: Takeover | None = None

    def send(self, duty: Arm | Sync, move: Move) -> None:
        """Send this rank's state to the joiner; a joiner that fails is the leader's business."""
        started = time.monotonic()
        try:
            size = self._carrier.send(duty, move, self._voice.status.step)
        except (LinkError, StateMismatch) as error:
            log.warning("state of rank %d not handed over: %s", move.rank, error)
            return
        seconds = time.monotonic() - started
        self._voice.say(timings={"copy": seconds, "copy_bytes": float(size)})

    def prepare(self, duty: Prepare) -> None:
        """Before a planned switch: check that the state fits, open the links, then say PREPARED."""
        started = time.monotonic()
        try:
            refusal = self._carrier.refusal(duty)
            if not refusal:
                self._fabric.prepare(
                    duty.membership,
                    duty.rank,
                    timeout=PREPARE_TIMEOUT_S,
                    cancel=lambda: self._agent.duty != duty,
                )
        except LinkError as error:
            refusal = str(error)
        if refusal:
            self._fabric.discard(duty.membership.epoch)
            self._voice.say(Activity.REFUSED, plan=duty.plan, detail=refusal)
            return
        # Not yet the rank: on the way to its place in the data, scripts save and print on rank 0.
        rest(self._fabric, self._voice.status.world_size)
        self._takeover = Takeover(duty)
        timings = {"prepare": time.monotonic() - started}
        self._voice.say(Activity.PREPARED, plan=duty.plan, timings=timings)

    def take_over(self) -> None:
        """After a planned switch: receive the state and go on as the rank in the new epoch."""
        takeover = self._takeover
        assert takeover is not None
        if not self._received(takeover):
            return
        self._fabric.switch(takeover.membership, takeover.rank)
        self._voice.say(
            Activity.TRAINING,
            rank=takeover.rank,
            epoch=takeover.membership.epoch,
            step=takeover.step,
            timings={**self._voice.status.timings, **takeover.timings},
        )
        self._carrier.walk(takeover)

    def replace(self, duty: Sync) -> bool:
        """After a loss: receive a replica's state; whether it is in place."""
        if self._takeover is None or self._takeover.duty != duty:
            self._takeover = Takeover(duty)
        takeover = self._takeover
        if not self._received(takeover):
            return False
        self._voice.say(rank=duty.rank, step=takeover.step, timings=takeover.timings)
        self._carrier.walk(takeover)
        return True

    def to_pool(self) -> None:
        """Give up whatever rank or identity there was and stand by."""
        if self._takeover is not None:
            self._fabric.discard(self._takeover.membership.epoch)
            self._takeover = None
        rest(self._fabric, self._voice.status.world_size)
        self._voice.say(Activity.STANDBY, plan="", rank=None, detail="")

    def _received(self, takeover: Takeover) -> bool:
        """Receive the state; False if it came to nothing and the status says what is next."""
        try:
            self._carrier.receive(takeover, lambda: not takeover.wanted(self._agent.duty))
        except StateMismatch as error:
            self._takeover = None
            self._voice.say(Activity.REFUSED, plan=takeover.plan, detail=str(error))
            return False
        except LinkError as error:
            log.warning("state not received for plan %s: %s", takeover.plan, error)
            self._agent.wait_until(lambda d: not takeover.wanted(d))
            self.to_pool()
            return False
        self._takeover = None
        return True
