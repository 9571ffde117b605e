"""What two workers must have built alike around a model, or a rank cannot move between them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tmd.fabric import GroupTable, GroupView


def bucket_layout(wrapped: Sequence[nn.Module]) -> str:
    """The buckets of all DDP modules, once their reducers have rebuilt them; else empty."""
    parts = []
    for module in wrapped:
        data = getattr(module, "_get_ddp_logging_data", None)
        if data is not None:
            parts.append(str(data().get("rebuilt_per_bucket_param_indices", "")))
    return "|".join(parts)


def bucket_mismatch(ours: str, theirs: str) -> str:
    """Why gradients would be summed in another order; empty if they would not."""
    if ours and theirs and ours != theirs:
        return f"gradient buckets differ: {ours} here, {theirs} there"
    return ""


def group_mismatch(ours: Sequence[GroupView], table: GroupTable, rank: int) -> str:
    """Why the groups built here cannot be those of ``rank``; empty if they can.

    All are in the order in which they were built. A standby runs the script as the last rank, and
    the n-th group of that rank has to be what the n-th group of ``rank`` is to that one; groups
    that span the world may follow.
    """
    theirs = table[rank] if rank < len(table) else ()
    here, there = ([len(ranks) for _, ranks in views] for views in (ours, theirs))
    if here[: len(there)] == there and all(size == len(table) for size in here[len(there) :]):
        return ""
    return (
        f"rank {rank} has process groups of {there} ranks, and this worker's script, which runs as "
        f"the last rank, has built {here}: ranks can only change places if all build groups alike"
    )
