"""Point-to-point messages of one group.

Messages have their own links and threads, so they wait neither for a collective nor for each other:
one thread per destination sends, one per incoming link reads. A message without a receive is kept,
so no order of sends and receives can deadlock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import inf

from tmd.core.values.errors import LinkError
from tmd.fabric.epoch_view import PROBE_PERIOD, SENDING, EpochView, LinkKey
from tmd.fabric.frame import FrameHeader, FrameKind, unpacked
from tmd.fabric.handshake import LinkPurpose
from tmd.fabric.inbox import ANY, Inbox, PostedReceive, UnclaimedMessage
from tmd.fabric.link import Link
from tmd.fabric.serial_executor import SerialExecutor
from tmd.fabric.transfer import PeerLate, PeerLost, receive_within, send

Current = Callable[[], EpochView | None]


class Mailbox:
    """Sends and receives of group ``group`` whose global ranks are ``ranks``."""

    def __init__(self, group: str, ranks: tuple[int, ...], current: Current) -> None:
        self._group = group
        self._ranks = ranks
        self._current = current
        self._inbox = Inbox()
        self._gone: dict[str, EpochView] = {}
        """Workers that closed their link, and the epoch in which they did."""
        self._outboxes: dict[int, SerialExecutor] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watch: threading.Thread | None = None

    def assume(self, group: str, ranks: tuple[int, ...]) -> None:
        """Become the mailbox of another group of the same size."""
        self._group, self._ranks = group, ranks

    def outbox(self, to: int) -> SerialExecutor:
        """The executor of all messages to a rank of the group."""
        with self._lock:
            lane = self._outboxes.get(to)
            if lane is None:
                lane = self._outboxes[to] = SerialExecutor(f"tmd-send-{self._group}-{to}")
                if self._closed.is_set():
                    lane.close()
            return lane

    def send(
        self,
        standing: EpochView,
        to: int,
        header: FrameHeader,
        payload: memoryview,
        patience: float,
    ) -> None:
        """Send one message, blocking; raises LinkError. Runs on the outbox of ``to``.

        ``patience``: see :meth:`EpochView.link`.
        """
        if standing.rank == self._ranks[to]:
            data = bytearray(payload)
            return self._arrive(
                UnclaimedMessage(to, header.detail, header.epoch, header.dtype, data)
            )
        link = standing.link(self._group, self._ranks[to], SENDING, patience=patience)
        send(link, header.packed(len(payload)), payload)

    def post(self, receive: PostedReceive) -> None:
        """Post a receive; its ``deliver`` is called once, from any thread."""
        message = self._inbox.post(receive)
        if message is not None:
            return self._hand_over(receive, message)
        if receive.standing.poisoned:
            return self.abort(receive.standing)
        self._check(receive)
        self._start_watch()

    def abort(self, standing: EpochView) -> None:
        """Complete the receives of an epoch that has ended, and drop its messages."""
        for receive in self._inbox.withdraw(standing):
            receive.deliver(LinkError(standing.reason or "the epoch is over"), receive.source)

    def carry(self, old: EpochView, new: EpochView) -> None:
        """Let the receives of ``old`` wait in ``new``, which follows it by plan."""
        # What was closed is not carried over: the peer may return. Awaited senders are probed anew.
        for receive, message in self._inbox.carry(old, new):
            self._hand_over(receive, message)

    @property
    def waiting(self) -> int:
        """Number of receives whose message has not begun to arrive."""
        return len(self._inbox.waiting())

    def has_in_flight(self, standing: EpochView, moved: frozenset[int]) -> bool:
        """Whether a receive waits for a rank of ``moved``, or a message of one has no receive yet.
        If this rank is in ``moved``, a receive or message of any rank counts."""
        sources = self._inbox.sources(standing.since)
        if standing.rank in moved:
            return bool(sources)
        return any(source == ANY or self._ranks[source] in moved for source in sources)

    def attach(self, link: Link) -> None:
        """Read ``link`` from now on, on a thread that ends with it."""
        name = f"tmd-read-{self._group}"
        try:
            threading.Thread(target=self._read, args=(link,), name=name, daemon=True).start()
        except RuntimeError:  # no thread can be had
            link.close()
            raise

    def drain(self, timeout: float) -> bool:
        """Wait until everything is sent; ``False`` after ``timeout``."""
        with self._lock:
            lanes = list(self._outboxes.values())
        return all(lane.drain(timeout) for lane in lanes)

    def close(self) -> None:
        """End the threads; those that read end with their links."""
        self._closed.set()
        with self._lock:
            for lane in self._outboxes.values():
                lane.close()

    # --- the reading threads -------------------------------------------------------------------

    def _read(self, link: Link) -> None:
        try:
            with link.in_use():
                while not link.severed:
                    if self._inbox.make_room(self._source(link.peer), PROBE_PERIOD):
                        self._read_one(link)
        except LinkError as e:
            self._lost(link, e)
        except Exception as e:  # such as no memory for a message
            self._lost(link, LinkError(f"a message from {link.peer} cannot be read: {e!r}"))
        finally:
            link.close()

    def _lost(self, link: Link, error: LinkError) -> None:
        standing = self._current()
        key = LinkKey(self._group, LinkPurpose.MESSAGES, link.peer)
        # A link of an ended epoch says nothing about the current one.
        if link.severed or standing is None or not standing.forget(key, link):
            return
        self._gone[link.peer] = standing
        if not isinstance(error, PeerLost):
            standing.blame(error)
        for receive in self._inbox.waiting():
            self._check(receive)

    def _read_one(self, link: Link) -> None:
        _fill(link, link.head)
        header, size = unpacked(link.head)
        source = self._source(link.peer)
        if header.kind != FrameKind.MESSAGE or source is None:
            raise LinkError(f"{link.peer} sent an invalid message for group {self._group}")
        receive = self._inbox.claim(source, header.detail, header.epoch)
        if receive is None:
            data = bytearray(size)
            _fill(link, memoryview(data))
            message = UnclaimedMessage(source, header.detail, header.epoch, header.dtype, data)
            return self._arrive(message)
        fault = receive.mismatch(header.dtype, size)
        try:
            if fault is not None:
                raise fault
            receive_within(link, receive.into, receive.patience_s)
        except LinkError as e:
            # It is off the list, so only this thread can complete it.
            receive.standing.blame(e)
            receive.deliver(e, source)
            raise
        receive.deliver(None, source)

    def _source(self, worker: str) -> int | None:
        standing = self._current()
        rank = standing.membership.rank_of(worker) if standing is not None else None
        return self._ranks.index(rank) if rank in self._ranks else None

    def _arrive(self, message: UnclaimedMessage) -> None:
        receive = self._inbox.arrive(message)
        if receive is not None:
            self._hand_over(receive, message)

    def _hand_over(self, receive: PostedReceive, message: UnclaimedMessage) -> None:
        fault = receive.mismatch(message.dtype, len(message.data))
        if fault is None:
            receive.into[:] = message.data
        else:
            receive.standing.blame(fault)
        receive.deliver(fault, message.source)

    # --- liveness of the sender ----------------------------------------------------------------

    def _check(self, receive: PostedReceive) -> None:
        """Poison the standing if the awaited sender has closed its link."""
        members = receive.standing.membership.members
        ranks = self._ranks if receive.source == ANY else (self._ranks[receive.source],)
        for rank in ranks:
            if self._gone.get(members[rank].worker) is receive.standing:
                receive.standing.blame(PeerLost(members[rank].worker, "closed by the other side"))

    def _start_watch(self) -> None:
        with self._lock:
            if self._watch is None:
                name = f"tmd-watch-{self._group}"
                watch = threading.Thread(target=self._watch_loop, name=name, daemon=True)
                watch.start()
                self._watch = watch  # not before: if no thread can be had, the next receive tries

    def _watch_loop(self) -> None:
        """Probe senders that have not dialled: without a link only a probe shows a dead one."""
        while not self._closed.wait(PROBE_PERIOD):
            waiting, now = self._inbox.waiting(), time.monotonic()
            for receive in waiting:
                if now > receive.deadline:
                    late = PeerLate(f"rank {receive.source} of group {self._group}")
                    receive.standing.blame(late)
            # Each sender once: a probe of a frozen one takes seconds.
            for standing, source in {(r.standing, r.source): None for r in waiting}:
                try:
                    self._verify(standing, source)
                except LinkError as e:
                    standing.blame(e)

    def _verify(self, standing: EpochView, source: int) -> None:
        if source == ANY or standing.poisoned:
            return
        member = standing.membership.members[self._ranks[source]]
        key = LinkKey(self._group, LinkPurpose.MESSAGES, member.worker)
        link = standing.links.get(key)
        if link is None or link.severed:
            standing.verify_patiently(member, ahead=True)


def _fill(link: Link, into: memoryview) -> None:
    receive_within(link, into, inf)
