"""Decides about an authenticated caller: accept it, keep it for a later epoch, or refuse it."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading

from tmd.core.values.model import Member, Membership
from tmd.fabric.counters import LinkCounters
from tmd.fabric.epoch_view import EpochView, LinkKey, Links, put
from tmd.fabric.handshake import HandshakeReply, HandshakeVerdict, LinkHello, LinkPurpose, Seal
from tmd.fabric.link import Link
from tmd.fabric.raw import RawLinks

AHEAD = 1 << 16
"""How many epochs ahead a link may be; a caller further ahead does not belong to this job."""
ENDED = 64
"""How many links of the latest epoch are kept after the other side has closed them: they show that
a joiner of the present plan is gone. All others belong to dropped plans, and each holds a
descriptor."""

_log = logging.getLogger("tmd.fabric")


class Admission:
    """Links of the current epoch go to ``standing``; links of later epochs wait here.

    ``lock`` is the fabric's: judging and storing a caller is atomic with any change of epoch.
    """

    def __init__(self, raw: RawLinks, counters: LinkCounters) -> None:
        self.lock = threading.RLock()
        self.standing: EpochView | None = None
        self.epoch = -1
        """The newest epoch of this worker; older ones are refused."""
        self._ahead: dict[int, Links] = {}
        self._unswept = 0
        """Links kept since the last sweep."""
        self._raw = raw
        self._counters = counters

    def admit(
        self, hello: LinkHello, sock: socket.socket, seal: Seal
    ) -> tuple[LinkKey, Link] | None:
        """Answer the caller and store its link; return the link if it is of the current epoch."""
        with self.lock:
            answer = self._judge(hello)
            if answer.verdict is HandshakeVerdict.REFUSED:
                self._counters.refused += 1
                # Common for a moment after a fault, so not a warning when the epoch was abandoned.
                level = logging.DEBUG if answer.poisoned else logging.WARNING
                _log.log(level, "link of %s refused: %s", hello.worker, answer.detail)
            try:
                sock.send(seal(answer))
            except OSError:
                sock.close()
                return None
            if answer.verdict is HandshakeVerdict.REFUSED or hello.purpose is LinkPurpose.PROBE:
                sock.close()
                return None
            return self._store(hello, Link(sock, hello.worker, hello.worker, hello.epoch))

    def keep(self, epoch: int, key: LinkKey, link: Link) -> None:
        """Keep ``link`` for a later ``epoch``; from time to time close those that have ended."""
        with self.lock:
            links = self._ahead.setdefault(epoch, {})
            surplus = put(links, key, link)
            links[key] = links.pop(key)  # the newest comes last
            self._unswept += 1
            if self._unswept >= ENDED:
                self._sweep()
        if surplus is not None:
            surplus.close()
        self._counters.count_link(key.group, key.worker)

    def _sweep(self) -> None:
        """Close the links that have ended, but for the newest of the latest epoch."""
        self._unswept = 0
        latest = max(self._ahead)
        for epoch, links in list(self._ahead.items()):
            ended = [key for key, link in links.items() if link.ended]
            for key in ended[:-ENDED] if epoch == latest else ended:
                links.pop(key).close()
            if not links:
                del self._ahead[epoch]

    def has(self, epoch: int, key: LinkKey) -> bool:
        """Whether a link waits for ``epoch`` that the other side has not closed."""
        with self.lock:
            link = self._ahead.get(epoch, {}).get(key)
            return link is not None and not link.ended

    def hung_up(self, later: Membership) -> list[Member]:
        """Members whose link for the epoch of ``later`` was closed by the other side."""
        with self.lock:
            links = self._ahead.get(later.epoch, {})
            gone = {key.worker for key, link in links.items() if link.ended}
        return [m for m in later.members if m.worker in gone]

    @property
    def waiting(self) -> int:
        """Number of links that wait for later epochs."""
        with self.lock:
            return sum(len(links) for links in self._ahead.values())

    def take(self, epoch: int) -> Links:
        """The links that waited for ``epoch``; links of older epochs and dead ones are closed."""
        with self.lock:
            found = self._ahead.pop(epoch, {})
            for old in [e for e in self._ahead if e < epoch]:
                self.discard(old)
            for key in [key for key, link in found.items() if link.ended]:
                found.pop(key).close()
            return found

    def discard(self, epoch: int) -> None:
        """Close the links that wait for ``epoch``."""
        with self.lock:
            for link in self._ahead.pop(epoch, {}).values():
                link.close()

    def discard_all(self) -> None:
        with self.lock:
            for epoch in list(self._ahead):
                self.discard(epoch)

    def _judge(self, hello: LinkHello) -> HandshakeReply:
        standing = self.standing
        poisoned = standing is not None and standing.poisoned
        suspects, settled = standing.presumed if standing is not None else ((), True)

        def answer(verdict: HandshakeVerdict, detail: str = "") -> HandshakeReply:
            epoch = standing.epoch if standing is not None else -1
            return HandshakeReply(verdict, detail, epoch, poisoned, settled, suspects)

        if hello.purpose in (LinkPurpose.RAW, LinkPurpose.PROBE):
            return answer(HandshakeVerdict.ACCEPTED)
        if hello.epoch < self.epoch or (hello.epoch == self.epoch and standing is None):
            return answer(
                HandshakeVerdict.REFUSED, f"epoch {hello.epoch} is over, current is {self.epoch}"
            )
        if hello.epoch > self.epoch + AHEAD and self.epoch >= 0:
            return answer(
                HandshakeVerdict.REFUSED, f"epoch {hello.epoch} is too far from {self.epoch}"
            )
        if standing is None or hello.epoch > standing.epoch:
            return answer(HandshakeVerdict.ACCEPTED)
        if poisoned:
            return answer(HandshakeVerdict.REFUSED, f"epoch {hello.epoch} was abandoned")
        if standing.membership.rank_of(hello.worker) is None:
            return answer(
                HandshakeVerdict.REFUSED, f"{hello.worker} is not a member of epoch {hello.epoch}"
            )
        return answer(HandshakeVerdict.ACCEPTED)

    def _store(self, hello: LinkHello, link: Link) -> tuple[LinkKey, Link] | None:
        key = LinkKey(hello.group, hello.purpose, hello.worker)
        if hello.purpose is LinkPurpose.RAW:
            self._raw.park(hello.group, link)
            return None
        if self.standing is None or hello.epoch > self.standing.epoch:
            self.keep(hello.epoch, key, link)
            return None
        if not self.standing.place(key, link):
            with contextlib.suppress(OSError):
                link.close()
            return None
        return key, link
