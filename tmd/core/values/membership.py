"""The holders of a job's ranks."""

from __future__ import annotations

from msgspec import Struct


class Member(Struct, frozen=True, gc=False):
    """One worker as known to its peers."""

    worker: str
    """Unique id of the process, never reused: ``<host>/<job>/<slot>.<incarnation>``."""
    host: str
    address: str
    """``ip:port`` at which its fabric accepts links."""


class Membership(Struct, frozen=True):
    """The holder of each rank: ``members[rank]``.

    The number of ranks never changes (invariant I2).
    """

    epoch: int
    """Group epoch: grows by one with every committed change (invariant I3)."""
    members: tuple[Member, ...]

    @property
    def size(self) -> int:
        return len(self.members)

    def rank_of(self, worker: str) -> int | None:
        """Rank held by ``worker`` or ``None``."""
        for rank, member in enumerate(self.members):
            if member.worker == worker:
                return rank
        return None

    def moved(self, later: Membership) -> frozenset[int]:
        """Ranks that have another owner in ``later``."""
        pairs = enumerate(zip(self.members, later.members, strict=True))
        return frozenset(rank for rank, (before, after) in pairs if before != after)

    def replaced(self, changes: dict[int, Member], epoch: int) -> Membership:
        """The membership of ``epoch`` in which each rank of ``changes`` has its new owner."""
        members = tuple(changes.get(rank, m) for rank, m in enumerate(self.members))
        return Membership(epoch=epoch, members=members)
