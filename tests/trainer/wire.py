"""Two ends of a link in one process, and a reader that records the frames at one end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from tmd.core.values.errors import LinkError
from tmd.fabric import Link
from tmd.trainer.protocol import frames
from tmd.trainer.protocol.frames import Frame

PATIENCE = 30.0

F = TypeVar("F")


@contextmanager
def linked(*, buffer: int | None = None, kind: type[Link] = Link) -> Iterator[tuple[Link, Link]]:
    """The source's end and the joiner's. ``buffer``: bytes that the joiner's side holds unread.
    ``kind``: the class of the joiner's end."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        if buffer is not None:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        ours = socket.create_connection(door.getsockname())
        theirs, _ = door.accept()
    near, far = Link(ours, "joiner", "source"), kind(theirs, "source", "source")
    try:
        yield near, far
    finally:
        near.close()
        far.close()


class Held:
    """A gate that holds every caller until it is opened."""

    def __init__(self) -> None:
        self._there, self._go = threading.Event(), threading.Event()

    def stay(self) -> None:
        self._there.set()
        assert self._go.wait(PATIENCE)

    def wait(self, seconds: float = PATIENCE) -> bool:
        """Wait until a caller has arrived; returns whether one has."""
        return self._there.wait(seconds)

    def let_go(self) -> None:
        self._go.set()


LOOK_S = 0.05


class Facts:
    """Facts set by threads, for others to wait for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    @contextmanager
    def changing(self) -> Iterator[None]:
        with self._changed:
            yield
            self._changed.notify_all()

    def until(self, enough: Callable[[], bool], timeout: float = PATIENCE) -> None:
        """Wait; raises ``TimeoutError`` if it never holds."""
        if not self.within(timeout, enough):
            raise TimeoutError("it never came to that")

    def within(self, seconds: float, enough: Callable[[], bool]) -> bool:
        """Wait ``seconds`` at most; returns whether it holds.

        Facts of the product's own objects notify nobody here, so the wait looks again by itself.
        """
        end = time.monotonic() + seconds
        with self._changed:
            while not enough():
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, LOOK_S))
        return True


class Ear(Facts):
    """Reads a link and keeps all frames; pauses while ``may_read`` is clear."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self.link = link
        self.received: list[tuple[Frame, list[Tensor]]] = []
        self.error: LinkError | None = None
        self.may_read = threading.Event()
        self.may_read.set()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def say(self, frame: Frame) -> None:
        frames.send(self.link, frames.Envelope(frame))

    def of(self, kind: type[F]) -> list[F]:
        return [frame for frame, _ in self.received if isinstance(frame, kind)]

    def first(self, kind: type[F], count: int = 1) -> F:
        """Wait for the ``count``-th frame of a kind."""
        self.until(lambda: len(self.of(kind)) >= count or self.error is not None)
        return self.of(kind)[count - 1]

    def end(self) -> None:
        """Read until the other side has closed the link."""
        self.may_read.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def _read(self) -> None:
        while self.may_read.wait(PATIENCE):
            try:
                frame, tensors = frames.receive(self.link)
            except LinkError as error:
                with self.changing():
                    self.error = error
                break
            with self.changing():
                self.received.append((frame, tensors))
        self.link.close()
