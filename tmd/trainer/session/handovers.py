"""What a script does on a worker whose rank has moved to another one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger("tmd.trainer")


class Handovers:
    """Functions of the script, called in the order in which they were added."""

    def __init__(self) -> None:
        self._functions: list[Callable[[], object]] = []

    def add(self, function: Callable[[], object]) -> None:
        self._functions.append(function)

    def run(self, report: Callable[[str], object]) -> None:
        """Call them. What one raises is logged: this worker may still be of use as a standby.

        ``report``: called with what this worker does meanwhile, and with nothing afterwards.
        """
        if not self._functions:
            return
        report("runs the functions of session.on_handover")
        started = time.monotonic()
        for function in self._functions:
            try:
                function()
            except Exception:
                log.exception("a function of session.on_handover failed")
        report("")
        log.info("session.on_handover took %.1f s", time.monotonic() - started)
