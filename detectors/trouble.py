"""Problems of a detector itself."""

from __future__ import annotations

from collections.abc import Iterator

from tmd.plugin import Severity, Signal, State


class Trouble:
    """A problem of the detector itself: reported when it begins and when it ends."""

    def __init__(self, code: str) -> None:
        self._code = code
        self._reported = False

    def report(self, problem: str) -> Iterator[Signal]:
        if bool(problem) == self._reported:
            return
        self._reported = bool(problem)
        state = State.RAISED if problem else State.CLEARED
        yield Signal(self._code, "host", Severity.WARNING, state, problem)
