"""What torch remembers of who this process is, corrected when it becomes somebody else.

torch asks a group for its rank each time, but keeps some things of its own: which global ranks a
group has, the place in a ``DeviceMesh``, FSDP2's place in its two groups, and what was computed
from a place: in DTensor's caches, and as constants in compiled code. As of torch 2.11 to 2.13.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
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
    moved = [_place(mesh) for mesh in _instances(MESH, "DeviceMesh")]
    if any(moved):
        _forget_places()
    for info in _instances(FSDP, "DataParallelMeshInfo"):
        for kind in ("shard", "replicate"):
            along = getattr(info, f"{kind}_process_group", None)
            if along is not None:
                setattr(info, f"{kind}_mesh_rank", along.rank())


def _place(mesh: Any) -> bool:
    """Correct the place in a mesh; whether it was another one."""
    mesh._rank = dist.get_rank()
    try:
        found = (mesh.mesh == mesh._rank).nonzero().tolist()
    except RuntimeError:  # a part of a mesh that does not have this rank
        found = []
    place = tuple(found[0]) if found else None
    old, mesh._coordinate_on_dim = mesh._coordinate_on_dim, place
    return old is None or place is None or tuple(old) != place


def _forget_places() -> None:
    """Nothing of this asks again whose place it was computed for."""
    reset = getattr(sys.modules.get("torch._dynamo"), "reset", None)
    if reset is not None:
        reset()
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _redistribute

    propagator = DTensor._op_dispatcher.sharding_propagator
    cache = type(propagator.propagate_op_sharding)
    # One for each thread: only another object forgets what all of them know.
    propagator.propagate_op_sharding = cache(propagator.propagate_op_sharding_non_cached)
    for clear in (
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None),
        getattr(getattr(_redistribute, "_gen_transform_infos", None), "cache_clear", None),
    ):
        if clear is not None:
            clear()


def _instances(module: str, name: str) -> Iterator[Any]:
    """All objects of a class, if its module was ever imported."""
    loaded = sys.modules.get(module)
    if loaded is None:
        return
    kind = getattr(loaded, name)
    if gc.get_freeze_count():
        gc.unfreeze()  # what is frozen cannot be found
    # By type(): some objects answer isinstance() with side effects.
    yield from [o for o in gc.get_objects() if issubclass(type(o), kind)]
