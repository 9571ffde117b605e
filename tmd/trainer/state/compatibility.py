"""What two workers must have built alike around a model, or a rank cannot move between them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tmd.fabric import GroupTable, GroupView
from tmd.torch_private.ddp import rebuilt_buckets
from tmd.trainer.state.state import Layouts, owned


def bucket_layout(wrapped: Sequence[nn.Module]) -> str:
    """The buckets of all DDP modules, once all their reducers have rebuilt them; else empty."""
    parts = [found for module in wrapped if (found := rebuilt_buckets(module)) is not None]
    return "|".join(parts) if all(parts) else ""


def bucket_mismatch(ours: str, theirs: str) -> str:
    """Why gradients would be summed in another order; empty if they would not."""
    if ours and theirs and ours != theirs:
        return f"gradient buckets differ: {ours} here, {theirs} there"
    return ""


def part_mismatch(ours: Layouts, theirs: Layouts) -> str:
    """Why this worker's part of a divided optimizer is not that of ``theirs``; empty if it is.

    Its constructor divides by the rank in the process group, so a standby has that of the rank as
    which it was built, and the names and shapes of its parameters tell nothing of it.
    """
    for name in sorted(ours.keys() & theirs.keys()):
        here, there = owned(ours[name]), owned(theirs[name])
        if here != there:
            return (
                f"{name} keeps the state of {_shown(here)} here, and of {_shown(there)} there: let "
                "session.build(function) build model and optimizer, so that a standby can build "
                "them again as another rank"
            )
    return ""


def _shown(names: Sequence[str] | None) -> str:
    if names is None:
        return "all parameters"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more or "no parameter"


def group_mismatch(ours: Sequence[GroupView], table: GroupTable, rank: int) -> str:
    """Why the groups built here cannot be those of ``rank``; empty if they can.

    All are in the order in which they were built, and the n-th has to be to ``rank`` what it was to
    the rank as which this worker's script built it. That holds if some rank has built what was
    built here, and the n-th groups of all ranks divide the world.
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
        f"rank {rank} has the process groups {needed}, and this worker's script has built {built}: "
        "ranks can only change places if all build their groups alike and in one order"
    )


def _divides(table: GroupTable) -> bool:
    """Whether all ranks have equally many groups, and members of an n-th group agree that it is."""
    return len({len(row) for row in table}) == 1 and all(
        table[member][n] == view
        for row in table
        for n, view in enumerate(row)
        for member in view.ranks
    )
