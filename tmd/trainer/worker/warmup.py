"""Shadow iterations of a worker without a rank, and its rebuild as another rank.

No directive is lost meanwhile: each states all that holds, so the one that needs another role is
met once that role is built and warm.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tmd.core.values.model import Activity
from tmd.fabric import Fabric, Neutral
from tmd.trainer.state_transfer.context import RankContext
from tmd.trainer.state_transfer.hindrance import Rebuild

SHADOW_STEPS = 2
"""The first builds what is lazy, the second has DDP's final buckets."""
ASLEEP = frozenset({Activity.STARTING, Activity.STANDBY, Activity.PREPARED})
"""Activities in which no step of a rank is at hand: there is time for shadow iterations."""

log = logging.getLogger("tmd.trainer")


class Warmup:
    """All calls come from the main thread."""

    def __init__(self) -> None:
        self._left = SHADOW_STEPS
        self._build: Callable[[], None] | None = None

    @property
    def several(self) -> bool:
        """Whether the script can build any rank's part."""
        return self._build is not None

    def by(self, build: Callable[[], None]) -> None:
        """``build`` makes the part of the rank that is worn."""
        self._build = build

    def build(self, fabric: Fabric) -> None:
        """Make the part of the rank that is worn or held.

        Raises:
            RuntimeError: the script's function has made process groups.
        """
        assert self._build is not None
        groups = len(fabric.built)
        self._build()
        if len(fabric.built) != groups:
            raise RuntimeError(
                "the function given to session.build() has made process groups: make them, and "
                "meshes, before, as all ranks do"
            )

    def is_due(self, activity: Activity) -> bool:
        """Whether a worker that does ``activity`` has shadow iterations to run."""
        return self._left > 0 and activity in ASLEEP

    def stepped(self) -> None:
        """One is over."""
        self._left -= 1

    def skip(self) -> None:
        """No more of them: it trains, or has no batches for them."""
        self._left = 0

    def become(self, other: Rebuild, context: RankContext, size: int) -> None:
        """Be built as another rank of ``size``.

        Raises:
            RuntimeError: the script's function has made process groups.
            StateMismatch: it has not built again what was there, of which the state was to stay.
        """
        log.info("building what rank %d is built as", other.rank)
        context.fabric.sandbox(Neutral(), other.rank, size)
        state = context.state.taken() if other.keeps else None
        context.state.let_go()
        self.build(context.fabric)
        if state is not None:
            context.state.give(*state)
        if other.cold:
            # The rank is still worn: a survivor goes to its own place in the data from here.
            self._left = 0
            return
        context.fit.rest()
        self._left = SHADOW_STEPS
