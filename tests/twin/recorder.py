"""Which accesses to the memory of a device are ordered, by the rules of CUDA.

Work of one stream runs in order. Work of two streams is unordered, unless one has waited for an
event of the other, or some thread has waited for the earlier work before the later was queued.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

HOST = "host"
"""Stands for the order of what the processor does."""


class Access(NamedTuple):
    """``place``: who accesses the memory, for messages."""

    stream: str
    tick: int
    writes: bool
    place: str


class Moment(NamedTuple):
    """Everything that is done once an event has happened: a tick by stream."""

    ticks: dict[str, int]


@dataclass
class Recorder:
    """Streams by name, and accesses by memory that may still be running. Thread-safe."""

    races: list[str] = field(default_factory=list)
    ordered: int = 0
    """Accesses that were ordered with running ones of another stream, or found them done."""
    waits: int = 0
    """How often a thread has waited for work."""
    _ticks: dict[str, int] = field(default_factory=dict)
    _waited: dict[str, dict[str, int]] = field(default_factory=dict)
    """By stream, then by other stream: the latest work that it has waited for."""
    _done: dict[str, int] = field(default_factory=dict)
    _accesses: dict[int, list[Access]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, stream: str, reads: Iterable[int], writes: Iterable[int], place: str) -> None:
        """One operation of ``stream`` begins; memory by number."""
        with self._lock:
            tick = self._ticks[stream] = self._ticks.get(stream, 0) + 1
            written = set(writes)
            for memory in {*reads, *written}:
                self._access(memory, Access(stream, tick, memory in written, place))

    def _access(self, memory: int, now: Access) -> None:
        before = self._accesses.get(memory, [])
        for old in before:
            if old.stream == now.stream or not (old.writes or now.writes):
                continue
            waited = self._waited.get(now.stream, {}).get(old.stream, 0)
            if old.tick <= max(waited, self._done.get(old.stream, 0)):
                self.ordered += 1
                continue
            self.races.append(
                f"{now.place} in stream {now.stream} {'writes' if now.writes else 'reads'} what "
                f"{old.place} in stream {old.stream} {'writes' if old.writes else 'reads'}, and no "
                "event orders the two"
            )
        # The latest access of each kind by a stream stands for its earlier ones.
        kept = [a for a in before if (a.stream, a.writes) != (now.stream, now.writes)]
        self._accesses[memory] = [*kept, now]

    def on_host(self, reads: Iterable[int], writes: Iterable[int], place: str) -> None:
        """The processor accesses memory, at once."""
        self.run(HOST, reads, writes, place)
        with self._lock:
            self._done[HOST] = self._ticks[HOST]

    def fresh(self, memory: int) -> None:
        """``memory`` has just been allocated."""
        with self._lock:
            self._accesses.pop(memory, None)

    def moment(self, stream: str) -> Moment:
        """Record an event in ``stream``."""
        with self._lock:
            here = {stream: self._ticks.get(stream, 0)}
            return Moment({**self._waited.get(stream, {}), **here})

    def finish(self, moment: Moment) -> None:
        """A thread has waited for the event."""
        with self._lock:
            self.waits += 1
            for stream, tick in moment.ticks.items():
                self._done[stream] = max(tick, self._done.get(stream, 0))

    def follow(self, stream: str, moment: Moment) -> None:
        """Later work of ``stream`` waits for the event."""
        with self._lock:
            waited = self._waited.setdefault(stream, {})
            for other, tick in moment.ticks.items():
                waited[other] = max(tick, waited.get(other, 0))
