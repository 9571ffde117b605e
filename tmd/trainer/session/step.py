"""Context of one training step: it begins, and is committed or poisoned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from tmd.trainer.session.hooks import Interrupted

if TYPE_CHECKING:
    from tmd.trainer.session.session import Session


class Step:
    """One step; made by :meth:`Session.step`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._loss: Tensor | float | None = None
        self.counts = False
        """After the block: whether the step was committed (always false for shadow iterations)."""

    def record(self, loss: Tensor | float) -> None:
        """Report the loss of this step for ``tmd status`` and the trace, if it is committed."""
        self._loss = loss.detach() if isinstance(loss, Tensor) else loss

    def __enter__(self) -> Step:
        self._session._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        session = self._session
        if kind is None:
            try:
                self.counts = session._end(self._loss)
            except Interrupted:
                session._spoil()
            return True
        # A script may fail an assertion of its own on garbage from aborted collectives.
        spoilt = session._hooks.poisoned and session._outcome is None
        if issubclass(kind, Interrupted) or (spoilt and issubclass(kind, Exception)):
            session._spoil()
            return True
        return False
