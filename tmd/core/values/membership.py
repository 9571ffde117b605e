"""The holders of a job's ranks."""

from __future__ import annotations

from collections.abc import Iterable

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
    """Group epoch: grows with every committed change and every recovery (invariant I3)."""
    members: tuple[Member, ...]
    adopted: dict[int, int] = {}
    """Ranks that nobody else could take, each with the own rank of the worker that holds it, too:
    ``members`` names that worker for both."""

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def workers(self) -> tuple[str, ...]:
        """Workers that hold ranks, each once, by their lowest rank."""
        return tuple(dict.fromkeys(member.worker for member in self.members))

    def rank_of(self, worker: str) -> int | None:
        """Rank held by ``worker`` or ``None``; its own one if it has adopted others."""
        for rank, member in enumerate(self.members):
            if member.worker == worker and rank not in self.adopted:
                return rank
        return None

    def held_by(self, worker: str) -> tuple[int, ...]:
        """All ranks that ``worker`` holds, in order."""
        return tuple(rank for rank, m in enumerate(self.members) if m.worker == worker)

    def adopter_of(self, rank: int) -> str:
        """Who has adopted ``rank``, in words; empty if nobody has."""
        own = self.adopted.get(rank)
        return "" if own is None else f"adopted by rank {own}"

    def crew(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Those of ``ranks`` that are the own ones of their holders: one for each worker."""
        if not self.adopted:
            return tuple(ranks)
        return tuple(rank for rank in ranks if rank not in self.adopted)

    def moved(self, later: Membership) -> frozenset[int]:
        """Ranks that have another owner in ``later``."""
        pairs = enumerate(zip(self.members, later.members, strict=True))
        return frozenset(rank for rank, (before, after) in pairs if before != after)

    def replaced(self, changes: dict[int, Member], epoch: int) -> Membership:
        """The membership of ``epoch`` in which each rank of ``changes`` has its new owner, as its
        own rank."""
        members = tuple(changes.get(rank, m) for rank, m in enumerate(self.members))
        adopted = {rank: own for rank, own in self.adopted.items() if rank not in changes}
        return Membership(epoch=epoch, members=members, adopted=adopted)

    def shrunk(self, adopted: dict[int, int]) -> Membership:
        """The same epoch in which the ranks of ``adopted``, and no others, are adopted by the
        holders of the given ranks."""
        holders = self.members
        members = tuple(holders[adopted.get(rank, rank)] for rank in range(self.size))
        return Membership(epoch=self.epoch, members=members, adopted=dict(sorted(adopted.items())))
