"""Ends the process of a script that has failed, if it does not end by itself.

A thread of the script, a function of ``atexit`` or a driver may keep it. Until it ends its rank is
not replaced, and all other ranks wait.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import threading
import time
from collections.abc import Callable

END_S = 10
"""Seconds for files that are flushed and logs that are sent, from the end of the main thread."""
USUAL_S = 2.0
"""A process that takes longer is logged."""

log = logging.getLogger("tmd.trainer")


def bound_the_end(failed: Callable[[], bool], within_s: int = END_S) -> None:
    """Let the kernel end this process ``within_s`` seconds after its main thread, if ``failed()``
    holds then."""
    threading.Thread(target=_bound, args=(failed, within_s), name="tmd-end", daemon=True).start()


def _bound(failed: Callable[[], bool], within_s: int) -> None:
    threading.main_thread().join()
    if not failed():
        return
    # The interpreter calls no handler of the script any more, and may run no thread either.
    ctypes.CDLL(None).signal(signal.SIGALRM, None)
    signal.alarm(within_s)
    time.sleep(USUAL_S)
    log.error(
        "the script has failed, but its process goes on, which keeps its rank from being replaced: "
        "SIGALRM ends it %d s after the end of the main thread. A thread that is no daemon may be "
        "the reason, or a function of atexit",
        within_s,
    )
