"""Counters of the fabric. Read by tests, metrics and the worker's status."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from threading import _DummyThread  # type: ignore[attr-defined, unused-ignore]


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

    def begin(self) -> None:
        """An operation was called.

        The main thread computes steps, and so do autograd's threads, which Python did not start.
        Any other thread, such as that of an asynchronous checkpoint, calls for its own purposes.
        """
        caller = threading.current_thread()
        self.begun += caller is threading.main_thread() or isinstance(caller, _DummyThread)
