"""Snapshots of a unique state: keepers, schedule, and the newest complete snapshot.

A *snapshot* of step s is the state of every rank at the start of s, stored twice: by its own worker
and by one on another host. It is complete while a copy for every rank exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct

EVERY = 10
"""Steps between two snapshots, unless a script sets another number."""


class Kept(Struct, frozen=True, order=True, array_like=True, gc=False):
    """A copy of the state of ``rank`` at the start of ``step``, in a worker's memory."""

    rank: int
    step: int


class Rollback(Struct, frozen=True):
    """All ranks return to the start of ``step``."""

    step: int
    repeats: int
    """Number of committed steps that are repeated."""

    @property
    def sentence(self) -> str:
        """The rollback in a sentence for operators."""
        steps = "1 step is" if self.repeats == 1 else f"{self.repeats} steps are"
        return f"rolled back to step {self.step}, {steps} repeated"


def wanted_every(requested: int | None, groups: Iterable[Sequence[int]], size: int) -> int:
    """Steps between two snapshots, 0 for none. ``requested`` is what the script asks for. Without
    it, snapshots are on only if a state is unique.

    ``groups``: the ranks, grouped by equal state. ``size``: the number of ranks.

    Raises:
        ValueError: ``requested`` is negative.
    """
    if requested is not None and requested < 0:
        raise ValueError(
            f"register(snapshots={requested}): must be a number of steps, or 0 for none"
        )
    if size == 1:
        return 0
    if requested is not None:
        return requested
    return EVERY if any(len(group) == 1 for group in groups) else 0


def keepers(hosts: Sequence[str]) -> tuple[int, ...]:
    """For each rank the rank that stores its second copy; ``hosts[rank]`` is the rank's host.

    It is always on the next host, so that the loss of one host never costs both copies of a rank.
    With a single host it is the next rank, which survives the loss of one worker.
    """
    if len(set(hosts)) < 2:
        return tuple((rank + 1) % len(hosts) for rank in range(len(hosts)))
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    circle = list(ranks)
    found = []
    for rank, host in enumerate(hosts):
        there = ranks[circle[(circle.index(host) + 1) % len(circle)]]
        found.append(there[ranks[host].index(rank) % len(there)])
    return tuple(found)


def is_due(step: int, every: int, *, fresh: bool) -> bool:
    """Whether a snapshot of ``step`` is due: the same answer on every rank.

    ``fresh``: the step is the first one of an epoch, whose keepers may be others, or of a
    ``batches()`` call. No rank can return to an earlier call.
    """
    return every > 0 and (fresh or step % every == 0)


def newest_whole(size: int, kept: Iterable[Iterable[Kept]], copies: int = 1) -> int | None:
    """The newest step with ``copies`` of every rank of ``size``. ``kept``: by worker."""
    times = Counter((copy.step, copy.rank) for one in kept for copy in set(one) if copy.rank < size)
    ranks = Counter(step for (step, _), count in times.items() if count >= copies)
    return max((step for step, found in ranks.items() if found == size), default=None)
