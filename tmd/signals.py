"""Delivers signals as events of a selector, so that they are handled in the loop only."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def signals(selector: selectors.BaseSelector, stop: Callable[[int], None]) -> Iterator[None]:
    """Call ``stop`` for a signal to end while ``selector`` is waited on.

    SIGHUP, which comes when a terminal closes, stays ignored if it is, as under ``nohup``.
    """
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    previous = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if previous[signal.SIGHUP] is signal.SIG_IGN:
        del previous[signal.SIGHUP]
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
