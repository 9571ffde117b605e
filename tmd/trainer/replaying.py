"""A rehearsal: to live a step of a rank from a recording, and come to the same bits.

The recording is what the rank has shown from the start of a step until a later digest of its state.
It lies in this worker's host memory, and once it is whole the rank is left alone: however long a
standby takes for its first real step, to compile it say, nobody waits and nothing piles up. A step
whose outputs do not fit is followed live instead.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from tmd.trainer.data import Feed
from tmd.trainer.following import Following


class Take(Enum):
    """Where the outputs of the steps at hand come from."""

    NONE = auto()  # no step has been computed yet
    RECORDED = auto()
    LIVE = auto()  # there was no room


class Replaying(Following):
    """One rehearsal of one rank. All calls come from the main thread."""

    _take = Take.NONE

    @property
    def in_step(self) -> bool:
        """Same bits after a step of its own; of a recorded one it does not matter when."""
        return self._shown if self._take is Take.RECORDED else super().in_step

    @property
    def overdue(self) -> bool:
        """Whether it has had its time to come to where it could record, or follow, a step."""
        return self._take is not Take.RECORDED and super().overdue

    def cancel(self) -> None:
        """Nobody asks for this any more (any thread); the link alone would not tell a replay."""
        self.shadow.spoil()

    def go_on(self, feed: Feed, tell: Callable[[], None] = lambda: None) -> None:
        """As :meth:`Following.go_on`; before the first step it waits until that is recorded."""
        super().go_on(feed, tell)
        while self._take is Take.NONE:
            self._take = self._recorded()
            if self._take is Take.NONE:
                # By the tail to the newest step, and from there.
                super().go_on(feed, tell)
        if self._take is Take.RECORDED:
            # The digest came long ago, and no boundary will follow with which to look at it.
            self.check_again()

    def _recorded(self) -> Take:
        if not self.shadow.holds_digest_after(self.step):
            return Take.LIVE
        # Before anything is computed from it: what differs later is this worker's own work then.
        self.check_again()
        if not self._proved:
            return Take.NONE
        self.jumps_no_more()
        self.shadow.close()
        return Take.RECORDED
