"""What torch remembers of who this process is, corrected when it becomes somebody else.

torch asks a group for its rank each time, but keeps some things of its own: which global ranks a
group has, the place in a ``DeviceMesh``, FSDP2's place in its two groups, and what was computed
from a place: in DTensor's caches, and as constants in compiled code. As of torch 2.11 to 2.13.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tmd.fabric.grouping import Participant

MESH = ("torch.distributed.device_mesh", "DeviceMesh")
FSDP = ("torch.distributed.fsdp._fully_shard._fsdp_common", "DataParallelMeshInfo")
SPEC = ("torch.distributed.tensor._dtensor_spec", "DTensorSpec")


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
    meshes, infos, specs = _instances(MESH, FSDP, SPEC)
    moves = [move for mesh in meshes if (move := _place(mesh))]
    if moves:
        _forget_compiled()
    if any(None in move for move in moves) or (moves and not all(map(_is_even, specs))):
        _forget_shards()
    for info in infos:
        for kind in ("shard", "replicate"):
            along = getattr(info, f"{kind}_process_group", None)
            if along is not None:
                setattr(info, f"{kind}_mesh_rank", along.rank())


def _place(mesh: Any) -> tuple[Any, Any] | None:
    """Correct the place in a mesh: from where to where, if it was another one."""
    mesh._rank = dist.get_rank()
    try:
        found = (mesh.mesh == mesh._rank).nonzero().tolist()
    except RuntimeError:  # a part of a mesh that does not have this rank
        found = []
    place = tuple(found[0]) if found else None
    old, mesh._coordinate_on_dim = mesh._coordinate_on_dim, place
    return None if old is not None and tuple(old) == place else (old, place)


def _is_even(spec: Any) -> bool:
    """Whether the parts of a tensor are of one shape in all places, as far as can be told."""
    parts: dict[int, int] = {}
    for dim, placement in enumerate(spec.placements):
        if placement.is_replicate() or placement.is_partial():
            continue
        cut = getattr(placement, "dim", None)
        if cut is None:
            return False
        parts[cut] = parts.get(cut, 1) * spec.mesh.size(dim)
    if math.prod(parts.values()) == 1:
        return True
    shape = () if spec.tensor_meta is None else spec.tensor_meta.shape
    return all(
        cut < len(shape) and isinstance(shape[cut], int) and shape[cut] % into == 0
        for cut, into in parts.items()
    )


def _forget_compiled() -> None:
    """A place may be a constant in it."""
    reset = getattr(sys.modules.get("torch._dynamo"), "reset", None)
    if reset is not None:
        reset()


def _forget_shards() -> None:
    """What DTensor has cached holds shapes of this rank's parts, and does not ask whose they were.

    Where all parts are alike it stays: to fill the caches again takes as long as a hundred steps.
    """
    if SPEC[0] not in sys.modules:
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


def _instances(*kinds: tuple[str, str]) -> list[list[Any]]:
    """All objects of each class, and of those below it, as far as its module was ever imported."""
    found: list[list[Any]] = [[] for _ in kinds]
    places = {
        kind: among
        for (module, name), among in zip(kinds, found, strict=True)
        if module in sys.modules
        for kind in _with_subclasses(getattr(sys.modules[module], name))
    }
    if not places:
        return found
    if gc.get_freeze_count():
        gc.unfreeze()  # what is frozen cannot be found
    # By type(): some objects answer isinstance() with side effects.
    for each in gc.get_objects():
        among = places.get(type(each))
        if among is not None:
            among.append(each)
    return found


def _with_subclasses(kind: type[Any]) -> list[type[Any]]:
    return [kind, *(k for below in kind.__subclasses__() for k in _with_subclasses(below))]
