"""The daemon's side of the listener: takes its output, never waits for it.

The listener writes a line after each wait, so silence means that the driver blocks it. It is then
abandoned, since it may not even die, and another one starts after a pause.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import msgspec

from tmd.plugin import PluginError, bare_python, in_words

from ..children import ABANDONED, LoneChild
from .xid_event import XidEvent

LIBRARY = "libnvidia-ml.so.1"
BINDINGS = "pynvml"
LISTENER = Path(__file__).with_name("listener.py")
LONGEST_WAIT_S = 5.0
PAUSE_S = (1.0, 10.0)
"""Pause between listeners, doubled from the first to the second: NVML stores no events."""
ENDS = 2
"""Consecutive failures that are a problem; the first may be a driver that was reloaded."""
_CHUNK = 65_536


def why_not(library: str = LIBRARY) -> str | None:
    """Why this host has no events, or ``None``. Does not contact the driver."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return f"there is no {LIBRARY}: the NVIDIA driver is not installed"
    return None


class Events:
    """Owns at most one active listener, which :meth:`close` ends."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._wait_ms = str(int(1000 * min(LONGEST_WAIT_S, deadline_s / 4)))
        self._children = LoneChild()
        self._buffer = b""
        self._spoke = 0.0
        self._next = float("-inf")
        self._ends = 0
        """Listeners that ended since the last successful wait."""
        self._last = ""
        self._deaf = ""
        self.problem = ""
        """What is not received now, and why."""

    @property
    def fd(self) -> int | None:
        """Readable when the listener has written something."""
        child = self._children.active
        return None if child is None else child.stdout

    def take(self, now: float) -> list[XidEvent]:
        """The XIDs received since the last call."""
        if self._children.active is None:
            self._start(now)
        if self.fd is None:
            return []
        try:
            chunk = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            if now - self._spoke > self._deadline_s:
                self._leave(now, f"the driver did not answer within {self._deadline_s:g} s", ENDS)
            return []
        if not chunk:
            self._leave(now, self._last or "the listener ended")
            return []
        self._spoke = now
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        try:
            return [event for event in map(self._parsed, lines) if event.xid]
        except msgspec.DecodeError:
            self._leave(now, "the listener sent an invalid line")
            return []

    async def close(self) -> None:
        """End the listener. One that is stuck in a wedged driver is left behind."""
        await self._children.close()

    def _parsed(self, line: bytes) -> XidEvent:
        event = msgspec.json.decode(line, type=XidEvent)
        if event.ended:
            self._last = event.ended
        elif event.gpus:
            self._deaf = "; ".join(event.deaf)
        else:
            self._ends, self.problem = 0, self._deaf
        return event

    def _start(self, now: float) -> None:
        hanging = self._children.hanging
        if now < self._next:
            return
        if hanging >= ABANDONED:
            self._next = now + PAUSE_S[1]
            return
        self._buffer, self._last, self._deaf, self._spoke = b"", "", "", now
        try:
            self._children.start(bare_python(LISTENER, self._wait_ms, needs=(BINDINGS,)))
        except (OSError, PluginError) as error:  # must not stop reading the log
            self._failed(now, f"the listener cannot be started: {in_words(error)}")

    def _leave(self, now: float, why: str, ends: int = 1) -> None:
        self._children.abandon()
        self._failed(now, why, ends)

    def _failed(self, now: float, why: str, ends: int = 1) -> None:
        self._ends += ends
        self._next = now + min(PAUSE_S[0] * 2 ** min(self._ends - 1, 10), PAUSE_S[1])
        if self._ends >= ENDS:
            self.problem = why
