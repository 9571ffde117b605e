"""A rehearsal: compute one recorded step of a rank, and compare the bits.

The recording is what the rank has shown from the start of a step until a later digest of its state:
one step as a rule, more if that digest came late. It lies in this worker's host memory, and once it
is whole the rank is left alone: however long a standby takes for its first real step, to compile it
say, nobody waits and nothing piles up. A step whose outputs do not fit is followed live instead.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from msgspec import structs

from tmd.core.planning.directives import Directive
from tmd.core.values.model import ShadowStatus
from tmd.trainer.shadow.session import ShadowSession
from tmd.trainer.state.data import Feed
from tmd.trainer.state_transfer.hindrance import NextLoop

LOOK_S = 1.0
"""How often, while it is recorded, somebody looks whether that takes too long."""


class OutputOrigin(Enum):
    """Where the outputs of this worker's own steps come from."""

    UNDECIDED = auto()  # it has not computed any
    RECORDED = auto()
    LIVE = auto()  # there was no room


class ReplaySession(ShadowSession):
    """One rehearsal of one rank. For the main thread, but for :meth:`give_way`."""

    _source = OutputOrigin.UNDECIDED

    @property
    def in_step(self) -> bool:
        """Same bits after a step of its own; of a recorded one it does not matter when."""
        return self._shown if self._recorded else super().in_step

    @property
    def overdue(self) -> bool:
        """Whether it has had its time to come to where it could record, or follow, a step."""
        return not self._recorded and super().overdue

    @property
    def has_state(self) -> bool:
        """Never of a recorded step: the rank has left that behind."""
        return not self._recorded and super().has_state

    @property
    def _recorded(self) -> bool:
        return self._source is OutputOrigin.RECORDED

    def status(self) -> ShadowStatus:
        """For the status: no recovery is to count on what is only replayed."""
        told = super().status()
        return structs.replace(told, verified=None, lag_s=0.0) if self._recorded else told

    def give_way(self, directive: Directive) -> None:
        """Something else is asked for (any thread). No link would end a replay, and nothing of it
        is of use in a recovery."""
        if self._recorded:
            self.shadow.spoil()
        else:
            super().give_way(directive)

    def go_on(self, feed: Feed, tell: Callable[[], None] = lambda: None) -> NextLoop | None:
        """As :meth:`ShadowSession.go_on`; before the first step it waits until that is recorded."""
        needed = super().go_on(feed, tell)
        if needed is None and self._recorded:
            # The digest came long ago, and no boundary will follow with which to look at it.
            self.check_again()
        return needed

    def _may_begin(self) -> bool:
        if not super()._may_begin():
            return False
        if self._source is OutputOrigin.UNDECIDED:
            self._record()
        return self._source is not OutputOrigin.UNDECIDED

    def _record(self) -> None:
        """Wait until the step at hand is recorded and let the rank go, or see why not."""
        while not self.shadow.records(self.step, LOOK_S):
            if self.shadow.is_crowded:
                self._source = OutputOrigin.LIVE
                return
            if self.overdue:
                return
        # Before anything is computed from it: what differs later is this worker's own work then.
        self.check_again()
        if self._proved:
            self.jumps_no_more()
            self._source = OutputOrigin.RECORDED
            self.shadow.close()
