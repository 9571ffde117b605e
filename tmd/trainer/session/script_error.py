"""The error with which a script has left its training, and after which it must not go on.

Other ranks may have committed the step that it left. So the process must end, with a status by
which the rank is replaced, even if the script catches the error first.
"""

from __future__ import annotations

from tmd.core.values.reasons import in_words
from tmd.trainer.session.hooks import StepHooks

IN_STEP = (
    "Other ranks may have committed the step, and here a part of it may be missing. Catch an error "
    "inside the step, or let it end the script: the rank is then replaced, and the step repeated. "
    "To leave out the update for a batch, call step.skip_update() on all ranks"
)
IN_LOOP = (
    "Other ranks may have got their batches. Catch an error of the data in the dataset, or let it "
    "end the script: the rank is then replaced, and the step repeated"
)
"""Consequence and remedy of an error that the script has not ended with."""


class ScriptError:
    """Of one session. An error that ends the process, such as SystemExit, has a status of its own,
    and its rank goes on to take part in collectives."""

    def __init__(self, hooks: StepHooks) -> None:
        self._hooks = hooks
        self._left = ""
        """Where, with which error and with which remedy; empty if nothing was left."""
        self._raised = False
        """Whether the latest training step, a part of it, or the loop has raised an error."""

    def begin(self) -> None:
        """A step begins."""
        self._raised = False

    def leave_step(self, error: BaseException) -> None:
        """The script leaves a training step with ``error``."""
        self._leave(f"in a training step: {in_words(error)}. {IN_STEP}", error)

    def leave_loop(self, error: Exception) -> None:
        """``batches()`` raises ``error`` between two steps."""
        self._leave(f"in session.batches(): {in_words(error)}. {IN_LOOP}", error)

    def _leave(self, what: str, error: BaseException) -> None:
        self._left = what
        self.leave_part(error)
        if self._raised:
            self._hooks.health.fail()

    def leave_part(self, error: BaseException) -> None:
        """A part of a training step raises ``error``. The script may go on with the next part."""
        self._raised = isinstance(error, Exception)

    def check(self) -> None:
        """Raises RuntimeError: the script has left a training step or the loop with an error."""
        if self._left:
            raise RuntimeError(f"the script goes on after an error {self._left}")

    def ends(self, *, is_open: bool) -> bool:
        """Whether an error has ended training. ``is_open``: a step has begun and not ended."""
        return self._raised and (is_open or bool(self._left))
