"""Counters of the fabric. Read by tests, metrics and the worker's status."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from threading import _DummyThread  # type: ignore[attr-defined, unused-ignore]

from tmd.fabric.callbacks import in_callback


@dataclass
class LinkCounters:
    """Links of groups, dialled or accepted, since the start. Raw links are not counted."""

    opened: int = 0
    by_peer: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By (group, worker at the other end)."""
    refused: int = 0
    """Authenticated callers that were refused (older epoch, not a member)."""
    bytes: int = 0
    """Payload of this worker's collectives (size of their outputs)."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count_link(self, group: str, peer: str) -> None:
        with self._lock:
            self.opened += 1
            self.by_peer[group, peer] += 1


class CallCounter:
    """Operations of the script's groups."""

    def __init__(self) -> None:
        self.ran = 0
        """Collectives that were run, by all threads."""
        self.begun = 0
        """Collectives and messages that the steps of the script have called, complete or not."""

        self.stepping: threading.Thread | None = None
        """The thread that computes the script's steps; any thread may if it is not set."""

    def begin(self) -> None:
        """An operation was called."""
        self.begun += self._computes()

    def of_step(self) -> bool:
        """Whether what this thread calls is part of a step: its own work, or a callback that the
        step has attached to an operation."""
        return self._computes() or in_callback()

    def _computes(self) -> bool:
        """The thread of the steps, or one of autograd, which Python did not start. Others, such as
        that of an asynchronous checkpoint, call operations for their own purposes."""
        caller = threading.current_thread()
        return self.stepping in (None, caller) or isinstance(caller, _DummyThread)
