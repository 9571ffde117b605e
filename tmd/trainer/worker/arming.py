"""Arming: this rank is ready to switch to another epoch at the next vote that agrees on it.

The agent's thread arms and disarms while the main thread votes. A running vote may already have
shown other ranks that this one is armed. Disarming therefore waits for its end, and never happens
after a vote that switched. Otherwise the leader could receive "disarmed" from a rank that switches
a moment later.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from tmd.core.planning.directives import Arm, Directive, Hold, Prepare, Train, Wait
from tmd.core.values.model import Membership, WorkerStatus
from tmd.core.worker.responses import Response, respond
from tmd.fabric import Fabric
from tmd.fabric.generations.inner import BuildTime
from tmd.trainer.protocol.step_vote import ticket
from tmd.trainer.shadow.sources import ShadowSources
from tmd.trainer.worker.build_watch import BuildWatch

log = logging.getLogger("tmd.trainer")


def must_wait(fabric: Fabric, sources: ShadowSources, step: int, order: Arm) -> bool:
    """Whether the switch of ``order`` must not follow ``step``."""
    later = order.membership
    if fabric.has_in_flight(later):
        log.info("epoch %d waits for a message with a rank that moves", later.epoch)
        return True
    return fabric.joiner_gone(later) or sources.hold(order.plan, step)


def halt_if_ordered(directive: Directive | None, fabric: Fabric, arming: Arming) -> None:
    """Halt in the present epoch, if ``directive`` orders that (any thread). It may have come before
    the epoch was entered."""
    held = fabric.membership
    if isinstance(directive, Hold) and held and directive.epoch <= held.epoch:
        arming.disarm()
        fabric.poison(f"plan {directive.plan} orders a halt")


def build_time(order: Arm | Prepare) -> BuildTime:
    """When the inner groups of the epoch of ``order`` are built."""
    return BuildTime.AT_SWITCH if order.builds_at_switch else BuildTime.BESIDE


class Arming:
    """Calls ``tell(epoch, plan, refusal)`` at each change: armed for ``epoch``, or 0.

    ``build(order, done)`` begins to build the groups of the epoch of an order, and calls ``done``
    with the reason why they cannot be built, or an empty one; ``discard(membership)`` drops them.
    """

    def __init__(
        self,
        tell: Callable[[int, str, str], None],
        build: Callable[[Arm, Callable[[str], None]], None],
        discard: Callable[[Membership], None],
    ) -> None:
        self._tell, self._build, self._discard = tell, build, discard
        self._lock = threading.Lock()
        self._building: Arm | None = None
        self._arm: Arm | None = None
        self._voted: Arm | None = None
        self._voting = False
        self._won = False
        self._followed: Arm | None = None
        """The latest order that won its vote."""
        self._dropped = ""
        self._next: Arm | None = None
        """What to arm after the running vote."""

    @classmethod
    def of(
        cls,
        fabric: Fabric,
        tell: Callable[[int, str, str], None],
        status: Callable[[], WorkerStatus],
    ) -> Arming:
        """The arming of the worker of ``fabric``. Groups that are built beside training are
        watched."""
        generations = fabric.generations
        watch = BuildWatch(status, generations.beside.failed)

        def build(order: Arm, done: Callable[[str], None]) -> None:
            later, when = order.membership, build_time(order)
            rank = later.rank_of(fabric.worker)
            if rank is None or generations.obstacle:
                return done("" if rank is None else generations.obstacle)
            start = partial(generations.prepare, fabric.groups_of(rank), later, when=when)
            if when is BuildTime.BESIDE:
                watch.build(later.epoch, start, done)
            else:
                start(done)

        def discard(later: Membership) -> None:
            watch.drop(later.epoch)
            generations.discard(later)

        return cls(tell, build, discard)

    def obey(self, directive: Directive, status: WorkerStatus) -> None:
        """Arm or disarm under ``directive``."""
        match directive:
            case Arm() if respond(directive, status) is Response.ARM:
                self.arm(directive)
            case Train():
                self.disarm(directive.dropped)
            case Wait():
                self.disarm()
            case _:
                pass

    def arm(self, order: Arm) -> None:
        """Be ready for the epoch of ``order`` from the next vote after its groups are built.

        An earlier order is disarmed first: what is built for it cannot be kept. If others may have
        seen it in the running vote, ``order`` has to wait for the end of that vote.
        """
        with self._lock:
            if self._won or order in (self._arm, self._building):
                return
            self._disarm()
            if self._voting and self._voted is not None:
                self._next = order
                return
            self._building = order
        self._begin(order)

    def _begin(self, order: Arm) -> None:
        """Build the groups of ``order``. It may have been disarmed since the lock was released; if
        so, nobody else drops what is built for it."""
        self._build(order, lambda refusal: self._built(order, refusal))
        with self._lock:
            voted = self._voted if self._voting else None
            if order not in (self._building, self._arm, voted, self._followed):
                self._discard(order.membership)

    def _built(self, order: Arm, refusal: str) -> None:
        with self._lock:
            if self._won or self._building != order:
                return
            if refusal:
                # It stays what is being built, so that the order is not tried again.
                log.warning("not ready for epoch %d: %s", order.membership.epoch, refusal)
                self._tell(0, order.plan, refusal)
                return
            self._building, self._arm = None, order
            self._tell(order.membership.epoch, order.plan, "")

    def disarm(self, plan: str = "") -> None:
        """Be ready for no epoch; report it at once, or after the running vote.

        With the name of a ``plan`` it is always reported, since the leader waits for it. After a
        vote that switched it is not: the next report shows the new epoch.
        """
        with self._lock:
            if not self._won:
                self._disarm(plan)

    def _disarm(self, plan: str = "") -> None:
        self._next = None
        if self._building is not None:
            self._discard(self._building.membership)
            self._building = None
        if self._arm is None and not plan:
            return
        armed, self._arm = self._arm, None
        if self._voting and self._voted is not None:
            self._dropped = plan
            return
        if armed is not None:
            self._discard(armed.membership)
        self._tell(0, plan, "")

    def begin_vote(self, must_wait: Callable[[Arm], bool]) -> int:
        """The ticket to vote for, 0 for none. Arming does not change until :meth:`end_vote`.

        A rank armed by an order for which ``must_wait`` holds does not vote for it yet: neighbours
        learn earlier than the leader of a joiner's death, of messages that would be lost, or of a
        joiner that is behind.
        """
        with self._lock:
            self._voting = True
            voted = self._voted = self._arm
        return 0 if voted is None or must_wait(voted) else ticket(voted.membership)

    def end_vote(self, agreed: int) -> Arm | None:
        """The directive to follow if the vote ``agreed`` on its ticket; then nothing is armed, and
        no directive changes that until :meth:`switched`."""
        with self._lock:
            won = self._end_vote(agreed)
            order, self._next = None if won else self._next, None
            self._building = order or self._building
        if order is not None:
            self._begin(order)
        return won

    def _end_vote(self, agreed: int) -> Arm | None:
        self._voting = False
        voted = self._voted
        if voted is not None and agreed == ticket(voted.membership):
            self._arm, self._followed = None, voted
            self._won = True
            self._dropped = ""
            return voted
        if self._arm is None and voted is not None:
            self._discard(voted.membership)
            self._tell(0, self._dropped, "")
        self._dropped = ""
        return None

    def switched(self) -> None:
        """The voted directive was followed, and the status shows it."""
        with self._lock:
            self._won = False
