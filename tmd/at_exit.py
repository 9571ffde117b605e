"""Registers functions that run when this process ends normally, but not when a fork of it does.

A fork inherits the functions of ``atexit``. If it ran them at its own end, it would close the
connections that it shares with its parent.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any


def at_exit(function: Callable[..., object], *args: Any) -> None:
    """Call ``function`` with ``args`` at the end of this process."""
    atexit.register(_run, os.getpid(), function, args)


def once_main_has_ended(function: Callable[..., object], *args: Any) -> None:
    """Call ``function`` with ``args`` once the main thread has ended, in the main thread.

    Then the interpreter waits for the script's other threads, maybe for ever. Functions of
    :func:`at_exit` come after that.
    """
    # Last in, first out: what these register waits for their threads, and must come later.
    for pool in ("thread", "process"):
        import_module(f"concurrent.futures.{pool}")
    # Private, but nothing public runs before threads are waited for.
    register: Callable[..., None] = vars(threading)["_register_atexit"]
    register(_run, os.getpid(), function, args)


def _run(pid: int, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    if pid == os.getpid():
        function(*args)
