"""The signals that ask a process to end: SIGINT, SIGTERM, and SIGHUP, which comes when a terminal
closes. SIGHUP stays ignored where it is, as under ``nohup``."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def as_ctrl_c() -> Iterator[None]:
    """Let each such signal act as SIGINT, so that everything that was begun is ended in order."""
    previous = _handled()
    for number in previous:
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    # A shell starts a command in the background with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _handled() -> dict[int, Any]:
    """The handlers of the signals now."""
    found = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    return {n: f for n, f in found.items() if n != signal.SIGHUP or f is not signal.SIG_IGN}


@contextlib.contextmanager
def signals(selector: selectors.BaseSelector, stop: Callable[[int], None]) -> Iterator[None]:
    """Call ``stop`` with each such signal while ``selector`` is waited on, and nowhere else."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    previous = _handled()
    for number in previous:
        signal.signal(number, lambda *_: None)
    old = signal.set_wakeup_fd(writer.fileno())

    def arrived(_: object) -> None:
        for number in reader.recv(64):
            if number in previous:
                stop(number)

    selector.register(reader, selectors.EVENT_READ, arrived)
    try:
        yield
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in previous.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()
