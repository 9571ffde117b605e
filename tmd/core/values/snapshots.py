"""Snapshots of a state that exists once: keepers, schedule, and which snapshot is whole.

A *snapshot* of step s is the state of every rank at the start of s, each kept twice: by its own
worker, and by one on another host. It is whole while every rank's copy is still somewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

EVERY = 10
"""Steps between two snapshots, unless a script says otherwise."""


class Kept(Struct, frozen=True, order=True, array_like=True):
    """A copy of the state of ``rank`` at the start of ``step``, in a worker's memory."""

    rank: int
    step: int


class Rollback(Struct, frozen=True):
    """All ranks go back to the start of ``step``."""

    step: int
    repeats: int
    """Steps that had been committed and are run again."""

    @property
    def sentence(self) -> str:
        """For people."""
        steps = "1 step is" if self.repeats == 1 else f"{self.repeats} steps are"
        return f"rolled back to step {self.step}, {steps} repeated"


def wanted_every(told: int | None, groups: Iterable[Sequence[int]], size: int) -> int:
    """Steps between two snapshots, 0 for none: as ``told``, else only if some state exists once.

    ``groups``: ranks of equal state, of ``size`` in all.

    Raises:
        ValueError: ``told`` is negative.
    """
    if told is not None and told < 0:
        raise ValueError(f"register(snapshots={told}): it is a number of steps, or 0 for none")
    if size == 1:
        return 0
    if told is not None:
        return told
    return EVERY if any(len(group) == 1 for group in groups) else 0


def keepers(hosts: Sequence[str]) -> tuple[int, ...]:
    """For each rank the one that keeps its copies; ``hosts[rank]`` is where a rank runs.

    Always on the next host, so that the loss of any one host loses no rank's two copies at once.
    If there is only one host, the next rank: that still survives the loss of one worker.
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

    ``fresh``: the step is the first one of an epoch, in which others keep the copies, or of a
    ``batches()`` call, since nobody can go back to an earlier one.
    """
    return every > 0 and (fresh or step % every == 0)


def newest_whole(size: int, kept: Iterable[Kept]) -> int | None:
    """The newest step of which a copy of every rank of ``size`` is in ``kept``."""
    ranks: dict[int, set[int]] = {}
    for copy in kept:
        ranks.setdefault(copy.step, set()).add(copy.rank)
    whole = [step for step, found in ranks.items() if found >= set(range(size))]
    return max(whole, default=None)
