"""Opens the links of a coming epoch before it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from tmd.core.values.errors import LinkError
from tmd.core.values.model import Member, Membership
from tmd.fabric.admission import Admission
from tmd.fabric.dial import Caller
from tmd.fabric.epoch_view import LinkKey
from tmd.fabric.frame import VOTE
from tmd.fabric.grouping import GroupView, edges
from tmd.fabric.handshake import LinkPurpose
from tmd.fabric.topology import dials, partners


class LinksAhead:
    """Dials as ``caller``, and keeps the links in ``admission`` until their epoch begins."""

    def __init__(self, caller: Caller, admission: Admission) -> None:
        self._caller, self._admission = caller, admission

    def open_all(
        self,
        views: Sequence[GroupView],
        membership: Membership,
        rank: int,
        timeout: float,
        cancel: Callable[[], bool],
    ) -> int:
        """Open every link of ``rank`` and return how many there are.

        Raises:
            LinkError: one cannot be opened, or ``cancel`` holds; none is left open.
        """
        opened = 0
        try:
            for group, peer in edges(views, membership, rank):
                if cancel():
                    raise LinkError("the preparation was cancelled")
                self._open(group, peer, membership.epoch, timeout)
                opened += 1
        except LinkError:
            self._admission.discard(membership.epoch)
            raise
        return opened

    def dial(
        self,
        views: Sequence[GroupView],
        membership: Membership,
        rank: int,
        timeout: float,
        cancel: Callable[[], bool],
    ) -> int:
        """Open the links that this worker dials, up to the first that fails; return how many."""
        opened = 0
        with suppress(LinkError):
            for group, peer in edges(views, membership, rank):
                if dials(self._caller.worker, peer.worker) and not cancel():
                    self._open(group, peer, membership.epoch, timeout)
                    opened += 1
        return opened

    def dial_votes(self, membership: Membership, rank: int) -> None:
        """Open the links of the votes that this worker dials, up to the first that fails.

        No others: over more links a rank that has switched already would pass on a loss to ranks
        that have not, and those could not tell which worker it was.
        """
        with suppress(LinkError):
            crew = membership.crew(range(membership.size))
            for partner in sorted(partners(crew.index(rank), len(crew))):
                peer = membership.members[crew[partner]]
                if dials(self._caller.worker, peer.worker):
                    self._open(VOTE, peer, membership.epoch, self._caller.patience_s)

    def _open(self, group: str, peer: Member, epoch: int, timeout: float) -> None:
        key = LinkKey(group, LinkPurpose.COLLECTIVE, peer.worker)
        # A second one would replace the first, whose end the peer would take for a loss.
        if not self._admission.has(epoch, key):
            link = self._caller.dial(peer, group, LinkPurpose.COLLECTIVE, epoch, timeout=timeout)
            self._admission.keep(epoch, key, link)
