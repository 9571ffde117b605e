"""Calls of plug-in code in the daemon's own thread: whatever it raises is an error that the daemon
can contain, and code that takes long is named.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BLOCKS_S = 1.0
"""Code that keeps the event loop for this long keeps the daemon from its work."""


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


@contextmanager
def timed_code(blocked: Callable[[float], None]) -> Iterator[None]:
    """Call ``blocked`` with the duration in seconds if the code takes longer than ``BLOCKS_S``,
    unless the process was stopped meanwhile."""
    began = time.monotonic()
    try:
        yield
    finally:
        took = time.monotonic() - began
        if took > BLOCKS_S and _Continued.at < began:
            blocked(took)


class _Continued:
    """When the process last went on after a stop, in seconds of the monotonic clock."""

    at = -math.inf


@contextmanager
def stops_noticed() -> Iterator[None]:
    """Main thread: notice when the process goes on after a SIGSTOP or Ctrl-Z."""

    def goes_on(*_: object) -> None:
        _Continued.at = time.monotonic()

    before = signal.signal(signal.SIGCONT, goes_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGCONT, before)


def _sigint_raises() -> bool:
    """Whether SIGINT raises ``KeyboardInterrupt`` here. The loop of the daemon handles it."""
    handler = signal.getsignal(signal.SIGINT)
    here = threading.current_thread() is threading.main_thread()
    return here and handler is signal.default_int_handler
