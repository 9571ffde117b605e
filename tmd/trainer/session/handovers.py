"""What a script does on a worker whose rank has moved to another one."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("tmd.trainer")


class Handovers:
    """Functions of the script, called in the order in which they were added."""

    def __init__(self) -> None:
        self._functions: list[Callable[[], object]] = []

    def add(self, function: Callable[[], object]) -> None:
        self._functions.append(function)

    def run(self) -> None:
        """Call them. What one raises is logged: this worker is a standby now, and still useful."""
        for function in self._functions:
            try:
                function()
            except Exception:
                log.exception("a function of session.on_handover failed")
