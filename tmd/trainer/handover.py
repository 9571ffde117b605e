"""The two sides of a rank changing hands, in the words of a worker's status.

What is carried and how is the business of :mod:`tmd.trainer.carrier` (the whole state, while it
stands still) and :mod:`tmd.trainer.following` (living the rank's life); here is what this worker
says meanwhile, and what becomes of it when the other side fails.
"""

from __future__ import annotations

import logging
import time

from tmd.core.duties import Arm, Duty, Follow, Keep, Prepare, Sync
from tmd.core.errors import LinkError, StateMismatch
from tmd.core.limits import ShadowLimits
from tmd.core.model import Activity, Move, Rehearsal
from tmd.fabric import Fabric, Link, Neutral
from tmd.trainer import frames
from tmd.trainer.agent import Agent
from tmd.trainer.carrier import CONNECT_TIMEOUT_S, Carrier
from tmd.trainer.following import Following, Overdue
from tmd.trainer.shadow import Lost, Shadow
from tmd.trainer.takeover import Takeover, WalkOn
from tmd.trainer.transfer import Offer
from tmd.trainer.units import Units
from tmd.trainer.voice import Voice

PREPARE_TIMEOUT_S = 30.0
RETRY_S = 1.0
"""Between two attempts to follow a rank."""
NEWS_S = 15.0
"""How long a hot standby whose vote never came waits for a plan: a new leader may be needed."""

log = logging.getLogger("tmd.trainer")


def rest(fabric: Fabric, size: int) -> None:
    """Hold no rank: neutral groups that report the last rank; scripts print and save on rank 0."""
    fabric.sandbox(Neutral(), size - 1, size)


class Handover:
    """All calls come from the main thread, but for :meth:`cancel_unless`."""

    def __init__(
        self,
        voice: Voice,
        agent: Agent,
        fabric: Fabric,
        carrier: Carrier,
        units: Units,
        limits: ShadowLimits,
    ) -> None:
        self._voice = voice
        self._agent = agent
        self._fabric = fabric
        self._carrier = carrier
        self._units = units
        self._limits = limits
        self._takeover: Takeover | None = None
        self.following: Following | None = None
        """SHADOWING and IN_STEP: the rank whose life is lived. STANDBY: was lived until now."""
        self._done_with: Follow | None = None
        self._not_before = 0.0

    def cancel_unless(self, duty: Duty) -> None:
        """Break off whatever belongs to another duty (any thread)."""
        self._carrier.cancel_unless(duty)
        following = self.following
        # What is on its way still counts in a recovery.
        if following is not None and duty != following.duty and not isinstance(duty, Keep):
            following.shadow.close()

    # --- source -----------------------------------------------------------------------------------

    def send(self, duty: Arm | Sync, move: Move) -> None:
        """Send this rank's state to the joiner; a joiner that fails is the leader's business."""
        started = time.monotonic()
        try:
            size = self._carrier.send(
                duty, move, self._voice.status.step, lambda: self._agent.duty == duty
            )
        except (LinkError, StateMismatch) as error:
            log.warning("state of rank %d not handed over: %s", move.rank, error)
            return
        seconds = time.monotonic() - started
        self._voice.say(timings={"copy": seconds, "copy_bytes": float(size)})

    # --- joiner: before a planned switch ----------------------------------------------------------

    def prepare(self, duty: Prepare) -> None:
        """Check that the state fits, open the links, and begin to follow the rank."""
        started = time.monotonic()
        self._end_following()
        link: Link | None = None
        try:
            link, offer = self._ask(duty)
            # Without an offer the leaver has left already; then it is the state that will tell.
            refusal = "" if offer is None else self._carrier.refusal(duty.rank, offer)
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
            if link is not None:
                link.close()
            self._refuse(duty, refusal)
            return
        assert link is not None
        # Not yet the rank: on the way to its place in the data, scripts save and print on rank 0.
        rest(self._fabric, self._voice.status.world_size)
        timings = {"prepare": time.monotonic() - started}
        if self._limits.enabled and offer is not None:
            self._begin_following(duty, link, offer, timings)
        else:
            link.close()
            why = "the leaver has left" if offer is None else "the live shadow is switched off"
            self._expect_state(duty, why, timings)

    def _begin_following(
        self, duty: Prepare | Follow, link: Link, offer: Offer, timings: dict[str, float]
    ) -> None:
        shadow = Shadow(link, frames.staging_bound(self._limits, self._units))
        following = Following(duty, shadow, offer, self._units, self._fabric, self._limits)
        self.following = following
        self._carrier.seeds = offer.seeds
        plan = duty.plan if isinstance(duty, Prepare) else ""
        self._voice.say(Activity.SHADOWING, plan=plan, timings=timings, shadow=following.told())
        present = self._agent.duty
        if present is not None:
            # It may have changed before there was anything that could be cancelled.
            self.cancel_unless(present)

    def follow(self) -> None:
        """At a step boundary of the joiner: come to where the next step can be computed."""
        following = self.following
        feed = self._carrier.feed
        assert following is not None
        assert feed is not None
        try:
            if following.has_switched:
                following.check_again()
                self._take(following)
                return
            following.go_on(feed)
        except WalkOn:
            # Between two batches() calls a script may do anything; it must not be the rank there.
            rest(self._fabric, self._voice.status.world_size)
            raise
        except StateMismatch as error:
            self._unfit(following, str(error))
        except LinkError as error:
            self._lost(following, error)
        else:
            self._tell(following)

    def _tell(self, following: Following) -> None:
        activity = self._voice.status.activity
        if activity is Activity.SHADOWING and following.in_step:
            self._in_step(following)
        elif activity is Activity.IN_STEP and following.is_late:
            self._voice.say(
                Activity.SHADOWING,
                shadow=following.told(),
                timings=self._voice.status.timings,
            )
        else:
            self._voice.say(step=following.step, shadow=following.told(), now=False)

    def _in_step(self, following: Following) -> None:
        duty = following.duty
        if isinstance(duty, Follow) and not duty.stay:
            self._done_with = duty
            self._rehearsed(following)
            return
        following.settle()
        self._voice.say(
            Activity.IN_STEP,
            step=following.step,
            shadow=following.told(),
            timings=self._voice.status.timings,
        )

    def _unfit(self, following: Following, reason: str) -> None:
        """This worker cannot be the rank."""
        duty = following.duty
        if isinstance(duty, Prepare):
            self._end_following()
            self._refuse(duty, reason)
        else:
            self._done_with = duty
            self._rehearsed(following, refusal=reason)

    def _rehearsed(self, following: Following, *, refusal: str = "", note: str = "") -> None:
        log.info("rehearsed rank %d: %s", following.duty.rank, refusal or note or "same bits")
        verdict = Rehearsal(following.step, following.seconds, refusal, note)
        self._voice.say(rehearsed=verdict, now=False)
        self.to_pool()

    def _lost(self, following: Following, error: LinkError) -> None:
        """Nothing to follow any more: what is here may still serve."""
        duty = following.duty
        hopeless = isinstance(error, Overdue) or (isinstance(error, Lost) and error.final)
        if isinstance(duty, Follow):
            if hopeless:
                # Slow is not unfit: it may have a rank, but need not be tried again.
                self._done_with = duty
                self._rehearsed(following, note=str(error))
            else:
                self._stand_by_with_state(following, error)
        elif hopeless:
            self._unfit(following, self._lateness(following, error))
        elif self._agent.duty != duty:
            self._fabric.discard(duty.membership.epoch)
            self.to_pool()
        else:
            # Still wanted: have the state copied at the switch.
            self._end_following()
            log.warning("plan %s: shadow lost its rank: %s", duty.plan, error)
            self._expect_state(duty, str(error), self._voice.status.timings)

    def _lateness(self, following: Following, error: LinkError) -> str:
        return f"{error}: {following.lag_s:.3f} s behind at steps of {following.step_s:.3f} s"

    def _take(self, following: Following) -> None:
        """The vote has given this worker the rank, and it has the state."""
        duty, told = following.duty, following.told()
        assert isinstance(duty, Prepare)
        following.take()
        self.following = None
        self._fabric.switch(duty.membership, duty.rank)
        self._voice.say(
            Activity.TRAINING,
            rank=duty.rank,
            epoch=duty.membership.epoch,
            shadow=None,
            timings={**self._voice.status.timings, "transfer": 0.0, "lag": told.lag_s},
        )

    # --- understudy: follows though no move is planned --------------------------------------------

    def wants(self, duty: Duty) -> bool:
        """Whether ``duty`` asks to follow a rank, and that was not tried a moment ago."""
        return (
            isinstance(duty, Follow)
            and duty != self._done_with
            and time.monotonic() >= self._not_before
        )

    def study(self, duty: Follow) -> None:
        """Begin to follow a rank."""
        self._not_before = time.monotonic() + RETRY_S
        try:
            link, offer = self._ask(duty)
        except LinkError as error:
            log.info("rank %d cannot be followed now: %s", duty.rank, error)
            return
        if offer is None:
            # A recovery goes on; what was followed until now may be of use in it.
            link.close()
            return
        self._end_following()
        if refusal := self._carrier.refusal(duty.rank, offer):
            link.close()
            self._done_with = duty
            self._voice.say(rehearsed=Rehearsal(0, 0.0, refusal), shadow=None)
            return
        self._begin_following(duty, link, offer, {})

    def rolls_forward(self) -> bool:
        """The mirrored vote never came: whether the survivors, halted, commit this step."""
        following = self.following
        if following is None or not isinstance(following.duty, Follow):
            return False
        self._say_standing_by(following, undecided=True)
        duty = self._agent.wait_a_while(lambda d: d != following.duty, NEWS_S)
        if isinstance(duty, Keep):
            duty = self._agent.wait_until(lambda d: not isinstance(d, Keep))
        return isinstance(duty, Sync) and duty.resume == following.step + 1

    def _stand_by_with_state(self, following: Following, error: LinkError) -> None:
        """A recovery may come that can use it."""
        log.info("rank %d: nothing more to follow: %s", following.duty.rank, error)
        following.shadow.close()
        rest(self._fabric, self._voice.status.world_size)
        if following.has_state and following.duty_stays:
            self._say_standing_by(following, undecided=False)
        else:
            self.to_pool()

    def _say_standing_by(self, following: Following, *, undecided: bool) -> None:
        self._voice.say(
            Activity.STANDBY,
            step=following.step,
            shadow=following.told(),
            undecided=undecided,
        )

    # --- common to both ---------------------------------------------------------------------------

    def _end_following(self) -> None:
        if self.following is not None:
            self.following.shadow.close()
            self.following = None
            rest(self._fabric, self._voice.status.world_size)

    def _ask(self, duty: Prepare | Follow) -> tuple[Link, Offer | None]:
        """Call on the source; no offer if it does not train now. Raises LinkError."""
        link = self._fabric.connect(duty.source, frames.PURPOSE, timeout=CONNECT_TIMEOUT_S)
        try:
            plan = duty.plan if isinstance(duty, Prepare) else ""
            frames.send(link, frames.Envelope(frames.Follow(plan, duty.rank)))
            link.patience(CONNECT_TIMEOUT_S)
            answer, _ = frames.receive(link)
            link.patience(0)
            if not isinstance(answer, frames.Opening | frames.Dropped):
                raise LinkError(f"{link.peer} answered with {type(answer).__name__}")
        except LinkError:
            link.close()
            raise
        return link, answer.offer if isinstance(answer, frames.Opening) else None

    def _expect_state(self, duty: Prepare, why: str, timings: dict[str, float]) -> None:
        """Stop-and-copy: the state comes after the switch."""
        self._takeover = Takeover(duty)
        self._voice.say(Activity.PREPARED, plan=duty.plan, detail=why, shadow=None, timings=timings)

    def _refuse(self, duty: Prepare, reason: str) -> None:
        self._fabric.discard(duty.membership.epoch)
        log.warning("plan %s refused: %s", duty.plan, reason)
        self._voice.say(Activity.REFUSED, plan=duty.plan, detail=reason, shadow=None)

    # --- joiner: the whole state ------------------------------------------------------------------

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
        rest(self._fabric, self._voice.status.world_size)
        following = self.following
        has_step = following.step if following is not None and following.has_state else None
        if not self._received(takeover, has_step):
            return False
        self._end_following()
        self._voice.say(shadow=None, rank=duty.rank, step=takeover.step, timings=takeover.timings)
        self._carrier.walk(takeover)
        return True

    def to_pool(self) -> None:
        """Give up whatever rank or identity there was and stand by."""
        self._end_following()
        if self._takeover is not None:
            self._fabric.discard(self._takeover.membership.epoch)
            self._takeover = None
        rest(self._fabric, self._voice.status.world_size)
        self._voice.say(Activity.STANDBY, plan="", rank=None, detail="", shadow=None)

    def _received(self, takeover: Takeover, has_step: int | None = None) -> bool:
        """Receive the state; False if it came to nothing and the status says what is next."""
        try:
            self._carrier.receive(takeover, lambda: not takeover.wanted(self._agent.duty), has_step)
        except StateMismatch as error:
            self._takeover = None
            log.warning("plan %s refused: %s", takeover.plan, error)
            self._voice.say(Activity.REFUSED, plan=takeover.plan, detail=str(error))
            return False
        except LinkError as error:
            log.warning("state not received for plan %s: %s", takeover.plan, error)
            self._agent.wait_until(lambda d: not takeover.wanted(d))
            self.to_pool()
            return False
        self._takeover = None
        return True
