"""One training step: where it begins, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import ParamSpec, TypeVar

from torch import Tensor

from tmd.trainer.session.hooks import Interrupted, Partial
from tmd.trainer.session.step_cycle import StepCycle

P = ParamSpec("P")
T = TypeVar("T")


class StepResult(Enum):
    """How a step ended."""

    COMMITTED = "committed"
    SPOILT = "spoilt"
    """Nothing of the step counts, and ``batches`` gives its batch again: a rank was lost, or a link
    broke."""
    SHADOW = "shadow"
    """A standby ran the step: nothing of it counts."""
    PARTIAL = "partial"
    """A worker that has adopted the rank of this batch ran the step: its gradients count in the
    step that follows at once, with the batch of another rank that this worker holds."""


ENDED_EARLY = frozenset({StepResult.SPOILT, StepResult.PARTIAL})


class Step:
    """One step; made by :meth:`Session.step` or :meth:`Session.begin`."""

    def __init__(self, cycle: StepCycle, *, trains: bool = True) -> None:
        """``trains``: whether an optimizer runs in it."""
        self._cycle, self._trains = cycle, trains
        self.result: StepResult | None = None
        """How the step ended; ``None`` until then."""

    @property
    def counts(self) -> bool:
        """After the step: whether it was committed (always false for shadow iterations)."""
        return self.result is StepResult.COMMITTED

    def record(self, loss: Tensor | float) -> None:
        """Report the loss of this step for ``tmd status`` and the trace, if it is committed.

        Call it before the optimizer: reading a loss that is recorded later waits for the device.
        """
        self._cycle.record(loss)

    def skip_update(self) -> None:
        """Vote on the step, in which no optimizer runs: call it where the optimizer would run.

        All ranks call it for the same batch, for example after gradients that are not finite. The
        step counts as any other one. Its gradients are dropped: those of the next step begin at
        zero. Without a ``with`` block call ``step.run(step.skip_update)``.

        Raises:
            RuntimeError: other ranks run an optimizer in this step.
        """
        if self.result is None:
            self._cycle.skip_update()

    def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call ``function``, a part of the step. Returns ``None`` if the step is spoilt.

        What a spoilt step raises is swallowed, and the parts that follow are not called. Other
        errors are raised. For a loop that cannot use ``with session.step()``.
        """
        if self.result is not None:
            return None
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if not self._is_spoilt_by(type(error)):
                self._cycle.leave_part(error)
                raise
            self._end_early(type(error))
            return None

    def end(self, loss: Tensor | float | None = None) -> StepResult:
        """End a step that :meth:`Session.begin` began. Vote if a GradScaler skipped the optimizer.

        Raises:
            RuntimeError: no registered optimizer was called in the step, or one has failed.
        """
        if loss is not None:
            self.record(loss)
        if self.result is None:
            try:
                counts = self._cycle.end()
                self.result = StepResult.COMMITTED if counts else StepResult.SHADOW
            except Interrupted as error:
                self._end_early(type(error))
            except BaseException as error:
                self._cycle.fail(error)
                raise
        assert self.result is not None
        return self.result

    def __enter__(self) -> Step:
        self._cycle.begin(trains=self._trains)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool:
        if self.result in ENDED_EARLY:
            # Step.run has ended it: its later parts return None, and code that uses them may fail.
            return kind is None or issubclass(kind, Exception)
        if kind is None or error is None:
            self.end()
        elif kind is GeneratorExit and self._cycle.outcome is not None:
            self.end()  # the step has voted, and a loop around a generator has ended by `break`
            return False
        elif self._is_spoilt_by(kind):
            self._end_early(kind)
        else:
            if self.result is None:
                self._cycle.fail(error)
            return False
        return True

    def _is_spoilt_by(self, kind: type[BaseException]) -> bool:
        """Whether an exception of ``kind`` was caused by the loss of a rank.

        A script may fail an assertion of its own on garbage from aborted collectives.
        """
        if issubclass(kind, Interrupted):
            return True
        # Last, since it waits for a plan while the step is suspended.
        may_be = self._cycle.outcome is None and issubclass(kind, Exception)
        return may_be and self._cycle.is_broken

    def _end_early(self, kind: type[BaseException]) -> None:
        if issubclass(kind, Partial):
            self.result = StepResult.PARTIAL
            self._cycle.end_pass()
            return
        self.result = StepResult.SPOILT
        self._cycle.spoil()
