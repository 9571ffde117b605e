"""How a joiner comes to live the life of a rank: copied state, tail, and then every step itself.

At each step boundary it waits for the source's word that the step begins. As long as it is not in
step it may jump: a boundary that is already over is reached by the tail alone. In step it is once
its digest has equalled the source's after a step that it computed itself.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from tmd.core.planning.directives import Directive, HoldState, Prepare, ShadowRank
from tmd.core.values.errors import LinkError
from tmd.core.values.limits import ShadowLimits
from tmd.core.values.model import ShadowStatus
from tmd.fabric import Fabric
from tmd.trainer.protocol.frames import (
    CHECK_EVERY,
    Begin,
    Boundary,
    DigestCheck,
    Settled,
    Tail,
    Took,
    Unit,
)
from tmd.trainer.protocol.offers import Offer
from tmd.trainer.protocol.step_vote import ticket
from tmd.trainer.protocol.take_over import AdvanceToNextLoop
from tmd.trainer.shadow.receiver import Arrival, Differs, ShadowReceiver
from tmd.trainer.state.data import Feed
from tmd.trainer.state.digests import Digest
from tmd.trainer.state.dtensors import like
from tmd.trainer.state.state import unflatten
from tmd.trainer.state.units import OTHERS, Units, whole_digest

FEW_STEPS = 20
"""Of the source: so many it may take in any case to come in step."""
REPLACEABLE_S, LAST_COPY_S = 0.02, 0.25
"""For so long nothing must come of a dead rank until its outputs are taken to have ended: if they
are lost on the way, a replica is copied, or else there is none (TCP sends again after 0.2 s)."""
UNNOTICED_S = 0.02
"""A lag that is never too large, however short the steps."""

log = logging.getLogger("tmd.trainer")


class Overdue(LinkError):
    """This worker cannot follow in time, or not at all; it may be perfectly sound."""


class ShadowSession:
    """One attempt to follow one rank. For the main thread, but for :meth:`give_way`."""

    def __init__(
        self,
        directive: Prepare | ShadowRank,
        shadow: ShadowReceiver,
        offer: Offer,
        units: Units,
        fabric: Fabric,
        limits: ShadowLimits,
    ) -> None:
        self.directive = directive
        self.shadow = shadow
        if isinstance(directive, Prepare):
            self._size, self._ticket = directive.membership.size, ticket(directive.membership)
        else:
            self._size, self._ticket = directive.size, 0
        self._call = offer.position.call
        self._units = units
        self._fabric = fabric
        self._limits = limits
        self._missing = set(range(len(units)))
        """Units that have not arrived."""
        self._at: int | None = None
        """The step at whose start this worker's state stands."""
        self._announced = -1
        """The newest step that the source was heard to begin."""
        self._between = False
        """Whether the tail of a step was applied, but where it leads to was not heard yet."""
        self._since = 0
        """Where it began to compute the steps itself."""
        self._first_own: int | None = None
        """The first of these that had a vote: the end of a ``batches()`` call shows nothing."""
        self._begun = self._placed = False
        self._tails = True
        self._settled = False
        self._ours: dict[int, Digest] = {}
        self._theirs: dict[int, Digest] = {}
        self._verified: int | None = None
        self.lag_s = 0.0
        """How long after the source this worker began its latest step."""
        self._boundaries: deque[float] = deque(maxlen=6)
        self._started = time.monotonic()
        self._positioned_at = 0.0
        self._switched = False
        self.exists_once = False
        """Whether nobody else has the state of the rank."""
        self.note = ""
        """What was out of the ordinary, for people."""

    # --- facts ------------------------------------------------------------------------------------

    @property
    def may_run(self) -> bool:
        """Whether the step at hand is the next to be computed."""
        return self._placed and not self.spoilt

    @property
    def spoilt(self) -> bool:
        """Whether the step under way has had to do without outputs."""
        return self.shadow.starved

    @property
    def step(self) -> int:
        return self._at or 0

    @property
    def has_state(self) -> bool:
        """Whether the state of the rank at the start of :attr:`step` is here, as far as known."""
        recent = self.step - (self._verified or 0) <= 2 * CHECK_EVERY
        return recent and self._proved and not self._between

    @property
    def _proved(self) -> bool:
        """Whether this state was found equal, or comes of one that was by own steps alone."""
        verified = self._verified
        return verified is not None and verified >= self._since

    @property
    def has_switched(self) -> bool:
        """Whether the vote has given this worker the rank, and it stands where it can take it."""
        return self._switched and not self.shadow.starved

    @property
    def in_step(self) -> bool:
        """Same bits after a step of its own, and as good as not behind."""
        return self._shown and self.lag_s <= self._unnoticed_s

    @property
    def _shown(self) -> bool:
        """Whether it has come to the same bits by a step of its own."""
        first, verified = self._first_own, self._verified
        return first is not None and verified is not None and self._since <= first < verified

    @property
    def is_late(self) -> bool:
        """In step once, and not any more."""
        return self.lag_s > 3 * self._unnoticed_s

    @property
    def _unnoticed_s(self) -> float:
        """The lag that still counts as none."""
        return max(self._limits.lag * self.step_s, UNNOTICED_S)

    @property
    def step_s(self) -> float:
        """Median time between two of the source's steps; 0 if unknown."""
        times = list(self._boundaries)
        return statistics.median([b - a for a, b in itertools.pairwise(times)] or [0.0])

    @property
    def overdue(self) -> bool:
        """Whether it has had its time to come in step."""
        since = self._positioned_at
        # Where steps are long, it is steps that count.
        patience = max(self._limits.patience_s, FEW_STEPS * self.step_s)
        return since > 0 and not self._settled and time.monotonic() - since > patience

    @property
    def keeps_shadowing(self) -> bool:
        """Whether it was to go on for good."""
        return isinstance(self.directive, ShadowRank) and self.directive.stay

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._started

    def told(self) -> ShadowStatus:
        """For the status."""
        return ShadowStatus(
            rank=self.directive.plays,
            copied=1 - len(self._missing) / max(len(self._units), 1),
            lag_s=self.lag_s,
            verified=self._verified,
            note=self.note,
        )

    # --- at a boundary, and after a step ----------------------------------------------------------

    def go_on(self, feed: Feed, tell: Callable[[], None] = lambda: None) -> None:
        """Come to where the next step can be computed; waits for the source.

        ``tell`` is called as the state arrives.

        Raises:
            LinkError: there is nothing to follow any more.
            Differs: this worker computes other bits.
            WalkOn: the place in the data is in a later ``batches()`` call; call again from there.
        """
        if self.shadow.mismatch:
            raise Differs(self.directive.plays, self.shadow.mismatch)
        if self.spoilt:
            raise self.shadow.lost
        if self._call > feed.call:
            raise AdvanceToNextLoop
        if not self._begun:
            self.shadow.send(Begin())
            self._begun = True
        while not self._may_begin():
            if self.overdue:
                raise Overdue(f"not in step with rank {self.directive.plays} in time")
            arrival = self.shadow.next_state()
            self._take_in(arrival, feed)
            if isinstance(arrival.frame, Unit):
                tell()
        self._placed = True

    def computed(self, step: int) -> None:
        """A step was computed: the state is that of the start of ``step`` now."""
        self._at = step
        self._placed = False

    def check_again(self) -> None:
        """Compare what digests have come meanwhile, before the rank is taken.

        Raises:
            Differs: this worker has computed other bits.
            LinkError: registered objects differ.
        """
        for step, parts in self.shadow.checks():
            self._theirs[step] = parts
            self._compare(step)

    def voted(self, agreed: int) -> None:
        """A step of its own counts; the vote agreed on a switch by that ticket, or on none (0)."""
        if self._first_own is None or self._first_own < self._since:
            self._first_own = self._at
        self._switched = agreed != 0 and agreed == self._ticket

    def settle(self) -> None:
        """In step: no more tails, and few digests."""
        self.jumps_no_more()
        self._settled = True
        self.shadow.send(Settled())

    def jumps_no_more(self) -> None:
        """From here on every step is computed here."""
        self._tails = False

    def give_way(self, directive: Directive) -> None:
        """Something else is asked for (any thread)."""
        match directive:
            case HoldState(over=False):
                pass  # what is on its way still counts in a recovery
            case HoldState():
                self.shadow.hear_out(LAST_COPY_S if self.exists_once else REPLACEABLE_S)
            case _:
                self.shadow.close()

    def take(self) -> None:
        """Say that nothing of the source is needed any more."""
        try:
            self.shadow.send(Took(self.step))
        except LinkError as error:
            log.info("source left before it was thanked: %s", error)

    # --- frames -----------------------------------------------------------------------------------

    def _may_begin(self) -> bool:
        """Whether the step at hand can be computed now.

        Not before the copy was found equal: a difference that shows up later is then this worker's
        own work.
        """
        began = self._at is not None and self._announced == self._at
        return began and self._verified is not None and not self._may_jump()

    def _take_in(self, arrival: Arrival, feed: Feed) -> None:
        """Use one frame."""
        frame, tensors, at = arrival
        match frame:
            case Unit():
                self._units.place(frame.number, frame.layout, tensors)
                self._missing.discard(frame.number)
            case Tail():
                if self._at is None or frame.step >= self._at:
                    self._follow(frame, tensors)
            case DigestCheck():
                self._theirs[frame.step] = frame.parts
                self._compare(frame.step)
            case Boundary() if not self._missing:
                if frame.position.call > feed.call:
                    self._call = frame.position.call
                    self.shadow.put_back(arrival)
                    raise AdvanceToNextLoop
                self._boundaries.append(at)
                if self._tails and self.shadow.newest_boundary() is not None:
                    # It is over already: the tails lead to a later one.
                    return
                if self._at != frame.step and not frame.quiet:
                    # What is still under way would be taken for an output of this step.
                    return
                self._stand(frame, tensors, feed)
                self._announced = frame.step
                self.lag_s = max(0.0, time.monotonic() - at)
                if frame.check:
                    self._ours[frame.step] = whole_digest(self._units, frame.step)
                    self._compare(frame.step)
            case _:
                pass

    def _may_jump(self) -> bool:
        newest = self.shadow.newest_boundary()
        return self._tails and newest is not None and newest > self.step

    def _stand(self, frame: Boundary, tensors: Sequence[Tensor], feed: Feed) -> None:
        if self._at == frame.step:
            return
        if frame.rest is None:
            raise LinkError(f"step {self._at} here, step {frame.step} there, and no way to jump")
        first = self._at is None
        self._fabric.sandbox(self.shadow, self.directive.plays, self._size)
        self._positioned_at = self._positioned_at or time.monotonic()
        self._units.place_rest(frame.rest, tensors)
        self._units.grade(frame.graded)
        self._at = self._since = frame.step
        self._between = False
        self.shadow.forget_before(frame.step)
        if first:
            feed.seek(frame.position.index)
        else:
            feed.skip_to(frame.position.index)

    def _follow(self, tail: Tail, tensors: Sequence[Tensor]) -> None:
        """The optimizer's work in one step, on the units that are here."""
        self._between = True
        optimizer = self._units.optimizers[tail.optimizer]
        params = self._units.params
        own = self._units.of(tail.optimizer)
        for number in own:
            params[number].grad = None
        for number, grad in zip(tail.units, tensors, strict=False):
            if number not in self._missing:
                params[number].grad = like(params[number], grad.to(params[number].device))
        values = unflatten(tail.values, iter(tensors[len(tail.units) :]))
        self._units.set_values(tail.optimizer, values)
        try:
            optimizer.step()
        except Exception as error:
            # An optimizer may do anything: the digest will tell, and then all is copied.
            log.info("%s cannot be followed: %s", type(optimizer).__name__, error)
        for number in own:
            params[number].grad = None

    # --- digests ----------------------------------------------------------------------------------

    def _compare(self, step: int) -> None:
        if step not in self._ours or step not in self._theirs:
            return
        ours, theirs = self._ours.pop(step), self._theirs.pop(step)
        differing = [part for part, digest in theirs.items() if ours.get(part) != digest]
        if not differing:
            self._verified = step
            for known in (self._ours, self._theirs):
                for old in [s for s in known if s < step]:
                    del known[old]
            return
        where = f"{' and '.join(differing)} at the start of step {step}"
        if not self._proved and self._tails:
            self._copy_whole(where)
            return
        self._verified = None
        if differing == [OTHERS]:
            why = f"registered objects differ after a step of this worker's own: {where}"
            # For a move the state may still be copied; an understudy would only try again.
            raise Overdue(why) if isinstance(self.directive, ShadowRank) else LinkError(why)
        raise Differs(self.directive.plays, f"{where} differ")

    def _copy_whole(self, where: str) -> None:
        """The tail did not lead to the same state: have all of it copied while the source waits.

        Only for a move that somebody has asked for: training does not wait for an understudy.
        """
        if isinstance(self.directive, ShadowRank):
            raise Overdue(f"the tail goes astray: {where} differ")
        self.note = f"copied while training waited once, since the tail went astray: {where} differ"
        log.warning("rank %d: %s", self.directive.plays, self.note)
        self._tails = False
        self._verified = None
        self._missing = set(range(len(self._units)))
        self._at = None
        self._ours.clear()
        self._theirs.clear()
        self.shadow.send(Begin(whole=True))
