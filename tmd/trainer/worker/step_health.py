"""Whether the present step of a worker can still be committed."""

from __future__ import annotations

from collections.abc import Callable

from tmd.core.values.model import Activity
from tmd.fabric import Fabric
from tmd.fabric.unfinished_step import StepState
from tmd.trainer.shadow.session import ShadowSession


class StepHealth:
    """``activity`` and ``following`` return what the worker does, and whom it shadows."""

    def __init__(
        self,
        fabric: Fabric,
        activity: Callable[[], Activity],
        following: Callable[[], ShadowSession | None],
    ) -> None:
        self._fabric, self._activity, self._following = fabric, activity, following

    @property
    def broken(self) -> bool:
        """Whether the step will be repeated. Waits until it is known whether a hot standby takes
        the place of a lost rank in it."""
        if self._fabric.step.is_void():
            return True
        if (following := self._following()) is not None:
            return following.spoilt
        return self._activity() is Activity.TRAINING and self._fabric.poisoned

    @property
    def known_broken(self) -> bool:
        """Whether it is known now that the step will be repeated. Never waits; a shadow's step is
        not covered."""
        state = self._fabric.step.state
        if state is StepState.VOID:
            return self._following() is None
        # A step that a standby may finish is OPEN before the epoch breaks, and then SUSPENDED.
        broken = state is StepState.CLOSED and self._fabric.poisoned
        return broken and self._activity() is Activity.TRAINING

    def settle(self) -> None:
        """Wait until what a broken step has called has ended: its state is put back next.

        Raises LinkError if an operation never ends.
        """
        if self.known_broken:
            self._fabric.drain()
