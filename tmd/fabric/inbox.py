"""Matches messages with receives, in either order of arrival."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tmd.core.values.errors import LinkError
from tmd.fabric.epoch_view import EpochView

KEPT = 256 << 20
"""Bytes of unrequested messages beyond which reading stops unless a receive waits."""

ANY = -1

Deliver = Callable[[LinkError | None, int], None]
"""Completes a receive: the error that aborted it, if any, and the rank that sent the message."""


@dataclass(eq=False)
class Message:
    """A message without a receive. ``source`` is a rank of the group."""

    source: int
    tag: int
    epoch: int
    dtype: int
    data: bytearray


@dataclass(eq=False)
class Wanted:
    """A posted receive. ``source`` may be ``ANY``."""

    source: int
    tag: int
    standing: EpochView
    dtype: int
    into: memoryview
    deliver: Deliver
    deadline: float
    """Monotonic time after which the sender is late."""

    def matches(self, source: int, tag: int, epoch: int) -> bool:
        counts = self.standing.since <= epoch <= self.standing.epoch
        return self.source in (ANY, source) and self.tag == tag and counts

    def misfit(self, dtype: int, size: int) -> LinkError | None:
        """Why a message of this type and size does not fit this receive."""
        if size == len(self.into) and dtype == self.dtype:
            return None
        return LinkError(
            f"a message of {size} bytes of type {dtype} met a receive for {len(self.into)} bytes "
            f"of type {self.dtype} (tag {self.tag})"
        )


class Inbox:
    """Thread-safe; oldest first on both sides."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[Message] = []
        self._wanted: list[Wanted] = []
        self._held = 0

    def post(self, wanted: Wanted) -> Message | None:
        """The matching message, removed; otherwise ``wanted`` waits here for one."""
        with self._changed:
            message = self._first(wanted)
            if message is None:
                self._wanted.append(wanted)
            self._changed.notify_all()
            return message

    def claim(self, source: int, tag: int, epoch: int) -> Wanted | None:
        """The matching receive, removed."""
        with self._changed:
            return self._take(source, tag, epoch)

    def arrive(self, message: Message) -> Wanted | None:
        """The receive that waits for ``message``, removed; otherwise the message stays here."""
        with self._changed:
            wanted = self._take(message.source, message.tag, message.epoch)
            if wanted is None:
                self._messages.append(message)
                self._held += len(message.data)
            return wanted

    def waiting(self) -> list[Wanted]:
        """A snapshot of the receives without a message."""
        with self._changed:
            return list(self._wanted)

    def withdraw(self, standing: EpochView) -> list[Wanted]:
        """Remove the receives of ``standing`` and drop the messages up to its epoch."""
        with self._changed:
            gone = [w for w in self._wanted if w.standing is standing]
            self._wanted = [w for w in self._wanted if w.standing is not standing]
            self._messages = [m for m in self._messages if m.epoch > standing.epoch]
            self._held = sum(len(m.data) for m in self._messages)
            self._changed.notify_all()
            return gone

    def carry(self, old: EpochView, new: EpochView) -> list[tuple[Wanted, Message]]:
        """Move the receives of ``old`` to ``new``; return those whose message is here, removed."""
        found = []
        with self._changed:
            for wanted in [w for w in self._wanted if w.standing is old]:
                wanted.standing = new
                message = self._first(wanted)
                if message is not None:
                    self._wanted.remove(wanted)
                    found.append((wanted, message))
            self._changed.notify_all()
        return found

    def sources(self, since: int) -> set[int]:
        """Sources of the waiting receives, and of the messages from epoch ``since`` on."""
        with self._changed:
            asked = {wanted.source for wanted in self._wanted}
            return asked | {m.source for m in self._messages if m.epoch >= since}

    def make_room(self, seconds: float) -> bool:
        """Wait until another message may be read; ``False`` if it may not yet."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._held < KEPT or bool(self._wanted), timeout=seconds
            )

    def _first(self, wanted: Wanted) -> Message | None:
        for message in self._messages:
            if wanted.matches(message.source, message.tag, message.epoch):
                self._messages.remove(message)
                self._held -= len(message.data)
                return message
        return None

    def _take(self, source: int, tag: int, epoch: int) -> Wanted | None:
        for wanted in self._wanted:
            if wanted.matches(source, tag, epoch):
                self._wanted.remove(wanted)
                return wanted
        return None
