"""Compares two workers' models: a rank can only move between workers that built them alike."""

from __future__ import annotations

from collections.abc import Sequence

from tmd.fabric import GroupTable, GroupView
from tmd.trainer.state.layout import Layouts
from tmd.trainer.state.roles import Role
from tmd.trainer.state.state import owned


def bucket_mismatch(ours: str, roles: Sequence[Role], rank: int) -> str:
    """Why gradients here would be added to those of other parameters on ranks like ``rank``; empty
    if they would not, or if its role is unknown. ``ours``: as :attr:`Role.buckets`."""
    if rank >= len(roles) or roles[rank].buckets == ours:
        return ""
    return (
        f"DDP groups gradients into other buckets here than on rank {rank}: build "
        "DistributedDataParallel with the same arguments on all workers"
    )


def part_mismatch(ours: Layouts, theirs: Layouts) -> str:
    """Why this worker's part of a divided optimizer differs from that of ``theirs``, or empty.

    The optimizer's constructor divides by the rank in the process group. A standby therefore has
    the part of the rank it was built for; names and shapes of its parameters do not show which.
    """
    for name in sorted(ours.keys() & theirs.keys()):
        here, there = owned(ours[name]), owned(theirs[name])
        if here != there:
            return (
                f"{name} keeps the state of {_shown(here)} here, and of {_shown(there)} there: "
                "build model and optimizer in session.build(function), so that a standby can "
                "rebuild them for another rank"
            )
    return ""


def _shown(names: Sequence[str] | None) -> str:
    if names is None:
        return "all parameters"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more or "no parameter"


def group_mismatch(ours: Sequence[GroupView], table: GroupTable, rank: int) -> str:
    """Why the groups built here cannot be those of ``rank``; empty if they can.

    Groups are listed in the order of their creation. The n-th must be to ``rank`` what it was to
    the rank that this worker's script was built for. That holds if some rank has built the same
    groups as this worker, and the n-th groups of all ranks divide the world.
    """
    size = len(table)
    theirs = table[rank] if rank < size else ()
    as_one = any(tuple(ours[: len(row)]) == row for row in table)
    as_large = [len(v.ranks) for v in ours[: len(theirs)]] == [len(v.ranks) for v in theirs]
    later = all(len(ranks) == size for _, ranks in ours[len(theirs) :])
    if as_one and as_large and later and _divides(table):
        return ""
    built, needed = ([list(ranks) for _, ranks in views] for views in (ours, theirs))
    return (
        f"rank {rank} has the process groups {needed}, but this worker's script built {built}: "
        "let all ranks build their groups alike and in one order, so that ranks can move"
    )


def _divides(table: GroupTable) -> bool:
    """Whether all ranks have equally many groups, and the members of each n-th group agree."""
    return len({len(row) for row in table}) == 1 and all(
        table[member][n] == view
        for row in table
        for n, view in enumerate(row)
        for member in view.ranks
    )
