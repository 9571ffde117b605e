"""Shadow iterations of a worker without a rank, and its rebuild for another rank.

No directive is lost meanwhile, since each one is complete: a directive for another role takes
effect once that role is built and warm.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tmd.core.values.model import Activity
from tmd.fabric import Fabric, Neutral
from tmd.trainer.state_transfer.context import RankContext
from tmd.trainer.state_transfer.obstacle import Rebuild

SHADOW_STEPS = 2
"""The first step creates what is lazy. The second may compile code once more, since gradients and
optimizer state are there."""
ASLEEP = frozenset({Activity.STARTING, Activity.STANDBY, Activity.PREPARED})
"""Activities without a rank's steps, which leave time for shadow iterations."""

log = logging.getLogger("tmd.trainer")


class Warmup:
    """Main thread only."""

    def __init__(self) -> None:
        self._left = SHADOW_STEPS
        self._build: Callable[[], None] | None = None

    @property
    def several(self) -> bool:
        """Whether the script can build any rank's part."""
        return self._build is not None

    def set_builder(self, build: Callable[[], None]) -> None:
        """``build`` makes the part of the impersonated rank."""
        self._build = build

    def build(self, fabric: Fabric) -> None:
        """Make the part of the rank that is held or impersonated.

        Raises:
            RuntimeError: the script's function has made process groups.
        """
        assert self._build is not None
        groups = len(fabric.built)
        self._build()
        if len(fabric.built) != groups:
            raise RuntimeError(
                "the function given to session.build() has made process groups: make groups and "
                "meshes before it, on all ranks"
            )

    def is_due(self, activity: Activity) -> bool:
        """Whether shadow iterations remain for a worker in ``activity``."""
        return self._left > 0 and activity in ASLEEP

    def stepped(self) -> None:
        """A shadow iteration has ended."""
        self._left -= 1

    def skip(self) -> None:
        """Run no more of them: the worker trains, or has no batches left."""
        self._left = 0

    def become(self, other: Rebuild, context: RankContext, size: int) -> None:
        """Rebuild for another rank of ``size``.

        Raises:
            RuntimeError: the script's function has made process groups.
            StateMismatch: the rebuilt state differs from the one to be kept.
        """
        log.info("building the model for rank %d", other.rank)
        context.fabric.sandbox(Neutral(), other.rank, size)
        state = context.state.taken() if other.keeps else None
        context.state.drop_objects()
        self.build(context.fabric)
        if state is not None:
            context.state.give(*state)
        if other.cold:
            # The rank stays impersonated: a survivor continues from its own data position.
            self._left = 0
            return
        context.fit.rest()
        self._left = SHADOW_STEPS
