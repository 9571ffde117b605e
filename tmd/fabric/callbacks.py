"""Runs the callbacks that a script attaches to the futures of operations.

The thread that completes an operation must not run its callbacks: one of them may call the next
operation of the same group and wait for it, as torch's PowerSGD hook does. And all ranks must call
the operations of a group in the same order. So an operation waits for the callbacks of its group
that were attached before it was called. The order of the callbacks of one script is the same on all
ranks only if it attaches each one before it calls the next operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from tmd.fabric.serial_executor import SerialExecutor
from tmd.fabric.wait_timer import WaitTimer


class _Running(threading.local):
    """Whether this thread runs a callback."""

    now = False


_running = _Running()


def _run(settle: Callable[[], None]) -> None:
    before, _running.now = _running.now, True
    try:
        settle()
    finally:
        _running.now = before


def in_callback() -> bool:
    """Whether this thread runs a callback."""
    return _running.now


def on_own_thread(settle: Callable[[], None]) -> None:
    """Call ``settle``, which runs callbacks, on a thread of its own."""
    threading.Thread(target=_run, args=(settle,), name="tmd-callback", daemon=True).start()


class Callbacks:
    """The callbacks of the collectives of a group, run in the order in which those complete."""

    def __init__(self, group: str, blocked: WaitTimer) -> None:
        self._blocked = blocked
        self._lane = SerialExecutor(f"tmd-callbacks-{group}")
        self._changed = threading.Condition()
        self._expected = 0

    def expect(self) -> Callable[[Callable[[], None]], None]:
        """Note that a callback was attached to an operation that is not complete.

        Call the result once, with the function that settles the future of the operation.
        """
        with self._changed:
            self._expected += 1
        nested = _running.now

        def run(settle: Callable[[], None]) -> None:
            def settled() -> None:
                try:
                    settle()
                finally:
                    self._ended()

            # A callback may wait for what it has attached itself.
            if nested:
                on_own_thread(settled)
            else:
                self._lane.run(partial(_run, settled), inline=False)

        return run

    def rest(self) -> None:
        """Wait until all that are expected have run; a callback itself does not wait."""
        if not self._expected or in_callback():
            return
        with self._blocked, self._changed:
            self._changed.wait_for(lambda: not self._expected)

    def close(self) -> None:
        """End the thread once it has run what is queued."""
        self._lane.close()

    def _ended(self) -> None:
        with self._changed:
            self._expected -= 1
            self._changed.notify_all()
