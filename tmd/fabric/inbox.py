"""Matches messages with receives, in either order of arrival."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tmd.core.values.errors import LinkError
from tmd.fabric.epoch_view import EpochView

KEPT = 256 << 20
"""Once this many bytes of messages are kept for which there is no receive, no more are read unless
a receive waits."""
KEPT_WAITING = 4 * KEPT
"""The same bound while a receive waits for another rank: that one may send only after its own
messages are read. Messages of the awaited rank are always read."""

ANY = -1

Deliver = Callable[[LinkError | None, int], None]
"""Completes a receive: the error that aborted it, if any, and the rank that sent the message."""


@dataclass(eq=False)
class UnclaimedMessage:
    """A message without a receive. ``source`` is a rank of the group."""

    source: int
    tag: int
    epoch: int
    dtype: int
    data: bytearray


@dataclass(eq=False)
class PostedReceive:
    """A posted receive. ``source`` may be ``ANY``."""

    source: int
    tag: int
    standing: EpochView
    dtype: int
    into: memoryview
    deliver: Deliver
    patience_s: float
    """The receive fails with PeerLate if no message begins for so many seconds, or if no byte of
    one that has begun arrives for so long."""

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.patience_s
        """Monotonic time until which a message must have begun."""

    def matches(self, source: int, tag: int, epoch: int) -> bool:
        counts = self.standing.since <= epoch <= self.standing.epoch
        return self.source in (ANY, source) and self.tag == tag and counts

    def mismatch(self, dtype: int, size: int) -> LinkError | None:
        """Why a message of this type and size does not fit this receive."""
        if size == len(self.into) and dtype == self.dtype:
            return None
        return LinkError(
            f"a message of {size} bytes of type {dtype} met a receive for {len(self.into)} bytes "
            f"of type {self.dtype} (tag {self.tag})"
        )


class Inbox:
    """Messages that no receive has claimed, and receives that wait for a message. Both are matched
    oldest first. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[UnclaimedMessage] = []
        self._receives: list[PostedReceive] = []
        self._held = 0
        self._newest_ended = -1
        """The newest epoch that has ended: messages up to it are dropped."""

    def post(self, receive: PostedReceive) -> UnclaimedMessage | None:
        """The matching message, removed; otherwise ``receive`` waits here for one."""
        with self._changed:
            message = self._pop_message(receive)
            if message is None:
                self._receives.append(receive)
            self._changed.notify_all()
            return message

    def claim(self, source: int, tag: int, epoch: int) -> PostedReceive | None:
        """The matching receive, removed; ``None`` if there is none."""
        with self._changed:
            return self._pop_receive(source, tag, epoch)

    def arrive(self, message: UnclaimedMessage) -> PostedReceive | None:
        """The receive that waits for ``message``, removed; otherwise the message stays here, unless
        its epoch is over."""
        with self._changed:
            receive = self._pop_receive(message.source, message.tag, message.epoch)
            if receive is None and message.epoch > self._newest_ended:
                self._messages.append(message)
                self._held += len(message.data)
            return receive

    def waiting(self) -> list[PostedReceive]:
        """A snapshot of the receives without a message."""
        with self._changed:
            return list(self._receives)

    def withdraw(self, standing: EpochView) -> list[PostedReceive]:
        """Remove the receives of ``standing`` and drop the messages up to its epoch."""
        with self._changed:
            self._newest_ended = max(self._newest_ended, standing.epoch)
            gone = [w for w in self._receives if w.standing is standing]
            self._receives = [w for w in self._receives if w.standing is not standing]
            self._messages = [m for m in self._messages if m.epoch > standing.epoch]
            self._held = sum(len(m.data) for m in self._messages)
            self._changed.notify_all()
            return gone

    def carry(self, old: EpochView, new: EpochView) -> list[tuple[PostedReceive, UnclaimedMessage]]:
        """Move the receives of ``old`` to ``new``; return those whose message is here, removed."""
        found = []
        with self._changed:
            for receive in [w for w in self._receives if w.standing is old]:
                receive.standing = new
                message = self._pop_message(receive)
                if message is not None:
                    self._receives.remove(receive)
                    found.append((receive, message))
            self._changed.notify_all()
        return found

    def sources(self, since: int) -> set[int]:
        """Sources of the waiting receives, which may be ``ANY``, and of messages since an epoch."""
        with self._changed:
            asked = {receive.source for receive in self._receives}
            return asked | {m.source for m in self._messages if m.epoch >= since}

    def make_room(self, source: int | None, seconds: float) -> bool:
        """Wait until another message of ``source`` may be read; ``False`` if it may not yet."""

        def is_room() -> bool:
            bound = KEPT_WAITING if self._receives else KEPT
            awaited = any(each.source in (ANY, source) for each in self._receives)
            return self._held < bound or awaited

        with self._changed:
            return self._changed.wait_for(is_room, timeout=seconds)

    def _pop_message(self, receive: PostedReceive) -> UnclaimedMessage | None:
        for message in self._messages:
            if receive.matches(message.source, message.tag, message.epoch):
                self._messages.remove(message)
                self._held -= len(message.data)
                return message
        return None

    def _pop_receive(self, source: int, tag: int, epoch: int) -> PostedReceive | None:
        for receive in self._receives:
            if receive.matches(source, tag, epoch):
                self._receives.remove(receive)
                return receive
        return None
