"""A running operation as its algorithm sees it: ranks of the group and messages between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from tmd.fabric.frame import FrameHeader
from tmd.fabric.link import Link
from tmd.fabric.memory import EMPTY, Scratch
from tmd.fabric.transfer import pump, receive, send, swap

OpenLink = Callable[[int], Link]
"""The link to a rank of the group, opened on demand; raises LinkError."""


class Op:
    """Messages of one operation. ``rank`` and ``size`` count the ranks of the group, or its workers
    where a worker has adopted further ranks."""

    __slots__ = ("_header", "_open", "rank", "scratch", "shares", "size")

    def __init__(
        self,
        rank: int,
        size: int,
        header: FrameHeader,
        open_link: OpenLink,
        scratch: Scratch,
        shares: int | None = None,
    ) -> None:
        """``shares``: number of ranks over which an average is taken; ``None``: ``size``."""
        self.rank = rank
        self.size = size
        self.shares = size if shares is None else shares
        self.scratch = scratch
        self._header = header
        self._open = open_link

    def send(self, to: int, payload: memoryview) -> None:
        """Send ``payload`` to a rank; return once ``payload`` may be overwritten."""
        send(self._open(to), self._header.packed(len(payload)), payload)

    def receive(self, source: int, into: memoryview) -> None:
        """Receive a rank's message into ``into``."""
        receive(self._open(source), self._header.packed(len(into)), into)

    def swap(self, to: int, payload: memoryview, source: int, into: memoryview) -> None:
        """Send to one rank and receive from another (or the same) at the same time."""
        out, inp = self._open(to), self._open(source)
        header = self._header.packed
        swap(out, header(len(payload)), payload, inp, header(len(into)), into)

    def stream(
        self,
        to: int | None,
        queue: deque[memoryview],
        total_out: int,
        source: int | None,
        arrivals: Iterator[memoryview | None],
        total_in: int,
        unit: int = 1,
    ) -> None:
        """Send ``total_out`` bytes through ``queue`` while ``arrivals`` takes ``total_in``.

        ``to`` or ``source`` is ``None`` if this rank does not send or does not receive.
        ``unit``: see :func:`tmd.fabric.transfer.pump`.
        """
        if to is None:
            assert source is not None
            link = self._open(source)
            receive(link, self._header.packed(total_in), EMPTY)  # only the header
            pump(link, queue, link, arrivals, None, unit)
            return
        out = self._open(to)
        queue.appendleft(memoryview(self._header.packed(total_out)))
        inp = out if source is None else self._open(source)
        expected = None if source is None else self._header.packed(total_in)
        pump(out, queue, inp, arrivals, expected, unit)
