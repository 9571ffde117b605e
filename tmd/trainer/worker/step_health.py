"""Whether the current step of a worker can still be committed."""

from __future__ import annotations

from collections.abc import Callable

from tmd.core.values.model import Activity
from tmd.fabric import Fabric
from tmd.fabric.unfinished_step import StepState
from tmd.trainer.shadow.session import ShadowSession


class StepHealth:
    """``activity`` returns the worker's activity. ``following`` returns the session of the shadow
    that the worker runs, or ``None``."""

    def __init__(
        self,
        fabric: Fabric,
        activity: Callable[[], Activity],
        following: Callable[[], ShadowSession | None],
    ) -> None:
        self._fabric, self._activity, self._following = fabric, activity, following

    @property
    def broken(self) -> bool:
        """Whether the step will be repeated. Blocks until it is decided whether a hot standby
        replaces the lost rank in this step."""
        if self._fabric.step.is_void():
            return True
        if (following := self._following()) is not None:
            return following.spoilt
        return self._activity() is Activity.TRAINING and self._fabric.poisoned

    @property
    def known_broken(self) -> bool:
        """Whether it is known now that the step will be repeated. Never blocks. False for the step
        of a shadow."""
        state = self._fabric.step.state
        if state is StepState.VOID:
            return self._following() is None
        # A step that a standby may finish is OPEN before the epoch breaks, and then SUSPENDED.
        broken = state is StepState.CLOSED and self._fabric.poisoned
        return broken and self._activity() is Activity.TRAINING

    def fail(self) -> None:
        """The script has failed. What it calls from now on does not concern the other ranks."""
        self._fabric.step.fail()

    def settle(self) -> None:
        """Wait until all operations that a broken step has started have ended. The caller restores
        the state afterwards.

        Raises LinkError if an operation never ends.
        """
        if self.known_broken:
            self._fabric.drain()
