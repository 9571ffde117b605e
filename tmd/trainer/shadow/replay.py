"""A rehearsal: compute one recorded step of a rank, and compare the bits.

The recording covers a rank from the start of a step until a later digest of its state: usually one
step, more if that digest came late. It is kept in this worker's host memory, and the source is
released once it is complete: a standby may take long for its first real step (to compile it, say),
and no rank waits for it. A step whose outputs exceed the memory is shadowed live instead.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from msgspec import structs

from tmd.core.planning.directives import Directive
from tmd.core.values.model import ShadowStatus
from tmd.trainer.shadow.session import ShadowSession
from tmd.trainer.state.data import Feed
from tmd.trainer.state_transfer.obstacle import NextLoop

LOOK_S = 1.0
"""Interval at which a running recording is checked for its time limit."""


class OutputOrigin(Enum):
    """Source of the outputs for this worker's own steps."""

    UNDECIDED = auto()  # no step was computed yet
    RECORDED = auto()
    LIVE = auto()  # the recording exceeded the memory


class ReplaySession(ShadowSession):
    """One rehearsal of one rank. Main thread only, except :meth:`give_way`."""

    _source = OutputOrigin.UNDECIDED

    @property
    def in_step(self) -> bool:
        """Whether a step of its own gave the same bits; the lag of a recorded step is ignored."""
        return self._shown if self._recorded else super().in_step

    @property
    def overdue(self) -> bool:
        """Whether its time is over in which it had to record, or shadow, a step."""
        return not self._recorded and super().overdue

    @property
    def has_state(self) -> bool:
        """Never in a recorded step, since the rank has moved on."""
        return not self._recorded and super().has_state

    @property
    def _recorded(self) -> bool:
        return self._source is OutputOrigin.RECORDED

    def status(self) -> ShadowStatus:
        """Reported without a verified state: no recovery may rely on a replay."""
        status = super().status()
        return structs.replace(status, verified=None, lag_s=0.0) if self._recorded else status

    def give_way(self, directive: Directive) -> None:
        """End the replay for another directive (any thread). It needs no link, and a recovery
        cannot use it."""
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
            if self._due:  # a step without an optimizer would prove nothing
                return False
            self._record()
        return self._source is not OutputOrigin.UNDECIDED

    def _record(self) -> None:
        """Wait until the current step is recorded and release the rank, or find that it cannot."""
        while not self.shadow.records(self.step, LOOK_S):
            if self.shadow.is_crowded:
                self._source = OutputOrigin.LIVE
                return
            if self.overdue:
                return
        # Compared before computing: any later difference then comes from this worker's own step.
        self.check_again()
        if self._proved:
            self.jumps_no_more()
            self._source = OutputOrigin.RECORDED
            self.shadow.close()
