"""Functions that run at the normal end of this process, and not at that of a fork of it.

A fork inherits what ``atexit`` knows. If it ends normally, as after a bare ``os.fork``, it would
close the connections that it shares with its parent, which works on.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any


def at_exit(function: Callable[..., object], *args: Any) -> None:
    """Call ``function`` with ``args`` at the end of this process."""
    atexit.register(_run, os.getpid(), function, args)


def _run(pid: int, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    if pid == os.getpid():
        function(*args)
