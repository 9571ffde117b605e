"""The classes of ``torch.distributed`` that have no public name, and its record of groups."""

from __future__ import annotations

from torch._C._distributed_c10d import Store, TCPStore, Work
from torch.distributed import ProcessGroup, distributed_c10d

__all__ = ["Store", "TCPStore", "Work", "group_ranks"]


def group_ranks() -> dict[ProcessGroup, dict[int, int]]:
    """What torch remembers of each group: global rank -> rank in the group. May be changed."""
    return distributed_c10d._world.pg_group_ranks
