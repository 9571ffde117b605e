"""Calls of plug-in code in the daemon's own thread: whatever it raises is an error that the daemon
can contain.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class PluginExit(RuntimeError):
    """Plug-in code raised what ends a process, such as ``SystemExit``."""


@contextmanager
def contained_exit(*passing: type[BaseException]) -> Iterator[None]:
    """Let errors of plug-in code pass, and those in ``passing``; turn what is no ``Exception`` into
    one. asyncio lets ``SystemExit`` and ``KeyboardInterrupt`` of a task end its loop.

    Raises:
        PluginExit: the code raised something else than an ``Exception``.
        KeyboardInterrupt: SIGINT came.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, (Exception, *passing)):
            raise
        if isinstance(error, KeyboardInterrupt) and _sigint_raises():
            raise
        raise PluginExit(f"raised {error!r}, which ends a process") from error


def _sigint_raises() -> bool:
    """Whether SIGINT raises ``KeyboardInterrupt`` here. The loop of the daemon handles it."""
    handler = signal.getsignal(signal.SIGINT)
    here = threading.current_thread() is threading.main_thread()
    return here and handler is signal.default_int_handler
