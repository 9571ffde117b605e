"""What torch remembers of who this process is, corrected when it becomes somebody else.

torch asks a group for its rank each time, but keeps three things of its own: which global ranks a
group has, the place in a ``DeviceMesh``, and FSDP2's place in its two groups. As of torch 2.11 to
2.13.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tmd.fabric.grouping import Participant

MESH = "torch.distributed.device_mesh"
FSDP = "torch.distributed.fsdp._fully_shard._fsdp_common"


def turn(groups: Iterable[Participant]) -> None:
    """Make torch see ``groups`` and the rank as they are now.

    Main thread, while no operation runs. Looks through all objects of the process for meshes,
    which takes tens of milliseconds, unless nothing that has any was imported.
    """
    known = distributed_c10d._world.pg_group_ranks
    for group in groups:
        if isinstance(group, dist.ProcessGroup) and group in known:
            known[group] = {rank: place for place, rank in enumerate(group.view.ranks)}
    if not dist.is_initialized():
        return
    for mesh in _instances(MESH, "DeviceMesh"):
        mesh._rank = dist.get_rank()
        place = (mesh.mesh == mesh._rank).nonzero().tolist()
        mesh._coordinate_on_dim = tuple(place[0]) if place else None
    for info in _instances(FSDP, "DataParallelMeshInfo"):
        for kind in ("shard", "replicate"):
            along = getattr(info, f"{kind}_process_group", None)
            if along is not None:
                setattr(info, f"{kind}_mesh_rank", along.rank())


def _instances(module: str, name: str) -> Iterator[Any]:
    """All objects of a class, if its module was ever imported."""
    loaded = sys.modules.get(module)
    if loaded is None:
        return
    kind = getattr(loaded, name)
    # By type(): some objects answer isinstance() with side effects.
    yield from [o for o in gc.get_objects() if issubclass(type(o), kind)]
