"""The state of this worker in one epoch: its rank, its links, and whether the epoch is poisoned.

An object is never reused for another epoch: an operation that still runs when the epoch changes can
only break its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from tmd.core.values.errors import LinkError
from tmd.core.values.model import Member, Membership
from tmd.fabric.counters import LinkCounters
from tmd.fabric.dial import Caller, GoOn, PeerBusy
from tmd.fabric.handshake import HandshakeReply, LinkPurpose
from tmd.fabric.link import Link
from tmd.fabric.link_watch import LinkWatch
from tmd.fabric.topology import dials
from tmd.fabric.transfer import PeerLate, PeerLost

PROBE_TIMEOUT = 1.0
PROBE_FIRST = 0.05
PROBE_PERIOD = 0.25
PROBE_AGAIN = 0.005

SENDING = "sending"


class LinkKey(NamedTuple):
    """Identifies a link: there is one per group, purpose and peer."""

    group: str
    purpose: str
    """``collective``; ``messages`` for incoming messages, ``sending`` for outgoing ones."""
    worker: str


Links = dict[LinkKey, Link]


def put(links: Links, key: LinkKey, link: Link) -> Link | None:
    """Store ``link``; if there are two, return the one to close.

    Two joiners may dial each other at the same time; both keep the link of the smaller worker id.
    """
    old = links.get(key)
    if old is not None and not old.severed and old.dialer < link.dialer:
        return link
    links[key] = link
    return old


class EpochContext(NamedTuple):
    """What all epochs of a worker use."""

    caller: Caller
    counters: LinkCounters
    watch: LinkWatch
    on_poison: Callable[[EpochView], None]
    """Called once an epoch is poisoned."""


class EpochView:
    """Rank ``rank`` of ``membership``, seen from the worker of ``context``."""

    def __init__(
        self, membership: Membership, rank: int, links: Links, context: EpochContext
    ) -> None:
        self.membership = membership
        self.rank = rank
        self.links = links
        self.since = membership.epoch
        """The first epoch whose messages count here: all changes after it were planned."""
        self.changed = threading.Condition()
        self.poisoned = False
        self.reason = ""
        self.held = membership.held_by(context.caller.worker) if membership.adopted else (rank,)
        """All ranks of this worker: ``rank``, which is its own one, and those it has adopted."""
        everyone = range(membership.size)
        self.crew: Sequence[int] = membership.crew(everyone) if membership.adopted else everyone
        """The own rank of each worker."""
        self._caller, self._context = context.caller, context
        self._suspects: tuple[str, ...] = ()
        self._settled = threading.Event()
        self._opening: list[str] = []
        for key, link in links.items():
            context.watch.opened(key.group, link)

    @property
    def epoch(self) -> int:
        return self.membership.epoch

    @property
    def size(self) -> int:
        return self.membership.size

    @property
    def shrunk(self) -> bool:
        """Whether workers have adopted ranks."""
        return bool(self.membership.adopted)

    @property
    def seat(self) -> tuple[int, int]:
        """Number of this worker among those of the epoch, and how many these are."""
        return self.crew.index(self.rank), len(self.crew)

    @property
    def suspects(self) -> tuple[str, ...]:
        """Workers whose link broke first; waits briefly while that is being determined."""
        if not self.poisoned:
            return ()
        self._settled.wait(2 * PROBE_TIMEOUT)
        return self._suspects

    @property
    def presumed(self) -> tuple[tuple[str, ...], bool]:
        """The suspects known now, and whether they are final."""
        return self._suspects, self._settled.is_set()

    # --- links ---------------------------------------------------------------------------------

    @property
    def linked(self) -> frozenset[str]:
        """Workers to which there is a link."""
        return frozenset(key.worker for key, _ in self.member_links())

    @property
    def opening(self) -> frozenset[str]:
        """Workers to which a link is being opened."""
        return frozenset(self._opening)

    def link(
        self,
        group: str,
        rank: int,
        purpose: str = LinkPurpose.COLLECTIVE,
        *,
        patience: float = 0.0,
    ) -> Link:
        """The link to ``rank``, opened now if there is none. Raises LinkError.

        One end dials and the other waits; the sender dials a link for outgoing messages. A peer
        that is alive may take ``patience`` seconds, 0 for any time; then this raises PeerLate. The
        same holds for each wait on the link.
        """
        member = self.membership.members[rank]
        key = LinkKey(group, purpose, member.worker)
        link = self.links.get(key) or self._open(key, member, patience)
        if patience and link.timeout_ms is None:
            link.patience(patience)
        return link

    def _open(self, key: LinkKey, member: Member, patience: float) -> Link:
        deadline = time.monotonic() + patience if patience else inf
        self._opening.append(member.worker)
        try:
            if key.purpose == SENDING or dials(self._caller.worker, member.worker):
                return self._dial(key, member, deadline)
            return self._expect(key, member, deadline)
        finally:
            self._opening.remove(member.worker)

    def place(self, key: LinkKey, link: Link) -> bool:
        """Store an incoming link; ``False`` if the epoch is poisoned."""
        with self.changed:
            if self.poisoned:
                return False
            surplus = put(self.links, key, link)
            if surplus is not None:
                surplus.close()
            self._context.counters.count_link(key.group, key.worker)
            self.changed.notify_all()
        self._context.watch.opened(key.group, link)
        return True

    def _dial(self, key: LinkKey, member: Member, deadline: float) -> Link:
        purpose = LinkPurpose.MESSAGES if key.purpose == SENDING else LinkPurpose(key.purpose)

        def go_on() -> bool:
            return not self.poisoned and time.monotonic() < deadline

        try:
            patience = self._caller.patience_s
            link = self._caller.dial(
                member, key.group, purpose, self.epoch, timeout=patience, go_on=go_on
            )
        except PeerBusy as e:
            if self.poisoned:
                raise LinkError("the epoch was abandoned") from e
            raise PeerLate(member.worker) from e
        except LinkError as e:
            raise PeerLost(member.worker, e) from e
        if not self.place(key, link):
            link.close()
            raise LinkError("the epoch was abandoned")
        return link

    def _expect(self, key: LinkKey, member: Member, deadline: float) -> Link:
        """Wait until ``member`` has dialled; check periodically that it is alive."""
        pause = PROBE_FIRST

        def is_over() -> bool:
            return key in self.links or self.poisoned

        def go_on() -> bool:
            return not is_over() and time.monotonic() < deadline

        while True:
            with self.changed:
                self.changed.wait_for(is_over, min(pause, deadline - time.monotonic()))
                if self.poisoned:
                    raise LinkError("the epoch was abandoned")
                if key in self.links:
                    return self.links[key]
            if time.monotonic() >= deadline:
                raise PeerLate(member.worker)
            self.verify_patiently(member, go_on)
            pause = min(2 * pause, PROBE_PERIOD)

    def verify(self, member: Member) -> None:
        """Raise PeerLost unless ``member`` answers and is in this epoch, or may still enter it."""
        answer = self._caller.probe(member, timeout=self._caller.patience_s)
        if answer is None:
            raise PeerLost(member.worker, "it does not answer")
        self._need_here(member, answer)

    def verify_patiently(
        self, member: Member, go_on: GoOn | None = None, *, ahead: bool = False
    ) -> None:
        """The same, but a process that does not answer a call that its kernel has accepted counts
        as alive. ``go_on``: whether to wait for its answer once more. ``ahead``: whether the
        member may be in a later epoch. A message counts on both sides of a planned switch."""
        try:
            answer = self._caller.ask(member, timeout=self._caller.patience_s, go_on=go_on)
        except PeerBusy:
            return
        except LinkError as e:
            raise PeerLost(member.worker, e) from e
        if not (ahead and answer.epoch > self.epoch):
            self._need_here(member, answer)

    def _need_here(self, member: Member, answer: HandshakeReply) -> None:
        if answer.epoch > self.epoch or (answer.epoch == self.epoch and answer.poisoned):
            raise PeerLost(member.worker, f"it has abandoned epoch {self.epoch}")

    def member_links(self) -> Iterator[tuple[LinkKey, Link]]:
        """A snapshot of all links."""
        with self.changed:
            return iter(list(self.links.items()))

    # --- abandoning the epoch ------------------------------------------------------------------

    def poison(self, reason: str, suspect: str = "") -> bool:
        """Abandon the epoch and wake all waiting threads; ``False`` if it was abandoned before.

        A ``suspect`` (the worker whose link broke) is asked whether it is alive. A live one only
        learned of the fault first, so its suspects are adopted.
        """
        with self.changed:
            if self.poisoned:
                return False
            self.poisoned = True
            self.reason = reason
            self._suspects = (suspect,) if suspect else ()
            links = list(self.links.values())
            self.changed.notify_all()
        for link in links:
            link.sever()
        self._context.on_poison(self)
        if suspect:
            self._suspects = self._root_cause(suspect)
        self._settled.set()
        return True

    def blame(self, error: LinkError) -> None:
        """Poison because of ``error``, unless it only results from an earlier poison."""
        suspect = error.worker if isinstance(error, PeerLost) else ""
        self.poison(str(error), suspect)

    def close_silently(self, *, orderly: bool = True) -> None:
        """Abandon the epoch without notifying this process.

        ``orderly``: peers may still need what was sent, and must not take this for a loss.
        """
        with self.changed:
            orderly &= not self.poisoned
            self.poisoned = True
            self._settled.set()
            links = list(self.links.items())
            self.changed.notify_all()
        for key, link in links:
            if orderly:
                self._context.watch.leaves(key.group, link)
            link.sever()

    def has(self, link: Link) -> bool:
        """Whether ``link`` is one of this epoch."""
        return any(each is link for _, each in self.member_links())

    def hand_over(self) -> Links:
        """Hand the links to the next epoch; no operation may run."""
        with self.changed:
            links, self.links = self.links, {}
            self.poisoned = True
            self._settled.set()
            return links

    def forget(self, key: LinkKey, link: Link) -> bool:
        """Remove the dead ``link``; ``False`` if it is not one of this epoch."""
        with self.changed:
            if self.links.get(key) is not link:
                return False
            del self.links[key]
            return True

    def drop(self, group: str) -> list[Link]:
        """Sever the links of a destroyed group, remove them from this epoch, and return them."""
        with self.changed:
            gone = [key for key in self.links if key.group == group]
            links = [self.links.pop(key) for key in gone]
        for link in links:
            link.sever()
        return links

    def close(self) -> None:
        """Close the links; no operation may run."""
        with self.changed:
            links, self.links = list(self.links.values()), {}
        for link in links:
            link.close()

    def _root_cause(self, suspect: str) -> tuple[str, ...]:
        rank = self.membership.rank_of(suspect)
        if rank is None:
            return (suspect,)
        deadline = time.monotonic() + PROBE_TIMEOUT
        while (left := deadline - time.monotonic()) > 0:
            answer = self._caller.probe(self.membership.members[rank], timeout=left)
            if answer is None:
                break
            if answer.epoch != self.epoch:
                return ()
            if not answer.poisoned:
                break
            if answer.settled:
                return tuple(w for w in answer.suspects if w != self._caller.worker)
            # The suspect is still determining its own suspects.
            self._settled.wait(PROBE_AGAIN)
        return (suspect,)
