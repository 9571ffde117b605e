"""Ends the process of a script that has failed, if it does not end by itself.

A thread of the script, a function of ``atexit`` or a driver may keep it. Until it ends its rank is
not replaced, and all other ranks wait.
"""

from __future__ import annotations

import ctypes
import logging
import signal
from collections.abc import Callable

from tmd.at_exit import once_main_has_ended

END_S = 150
"""Seconds from the end of the main thread: longer than a checkpoint that is being written is waited
for."""

log = logging.getLogger("tmd.trainer")


def bound_the_end(failed: Callable[[], bool], within_s: int = END_S) -> None:
    """Let the kernel end this process ``within_s`` seconds after its main thread, if ``failed()``
    holds then."""
    once_main_has_ended(_begin, failed, within_s)


def _begin(failed: Callable[[], bool], within_s: int) -> None:
    if not failed():
        return
    log.info("the script has failed: its process ends within %d s, if need be by SIGALRM", within_s)
    # The interpreter calls no handler of the script any more, and may run no thread either.
    ctypes.CDLL(None).signal(signal.SIGALRM, None)
    signal.alarm(within_s)
