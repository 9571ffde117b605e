"""What two workers must have built alike around a model, or a rank cannot move between them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tmd.fabric import GroupView


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


def group_mismatch(ours: Sequence[GroupView], theirs: Sequence[GroupView], rank: int) -> str:
    """Why this worker lacks a process group of ``rank``; empty if it does not.

    A standby runs the script as the last rank, so it has only built that one's sub-groups.
    """
    here = {(name, tuple(ranks)) for name, ranks in ours}
    needed = {(name, tuple(ranks)) for name, ranks in theirs if rank in ranks}
    wrong = [ranks for _, ranks in sorted(here) if rank not in ranks]
    lacking = [ranks for _, ranks in sorted(needed - here)]
    if not wrong and not lacking:
        return ""
    groups = ", ".join(str(list(ranks)) for ranks in (lacking or wrong)[:3])
    return (
        f"rank {rank} belongs to process groups that this worker's script did not build as its own "
        f"({groups}): ranks of sub-groups can only be moved by a job whose groups span the world"
    )
