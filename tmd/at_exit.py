"""Registers functions that run when this process ends normally, but not when a fork of it does.

A fork inherits the functions of ``atexit``. If it ran them at its own end, it would close the
connections that it shares with its parent.
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
