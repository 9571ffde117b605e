"""What torch remembers of who this process is, corrected when it becomes somebody else.

torch asks a group for its rank each time, but keeps some things of its own: which global ranks a
group has, the place in a ``DeviceMesh``, FSDP2's place in its two groups, and what was computed
from a place: in DTensor's caches, and as constants in compiled code. Places are made attributes
that ask; the rest is corrected at each turn. As of torch 2.11 to 2.13.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tmd.fabric.grouping import Participant

FSDP = "torch.distributed.fsdp._fully_shard._fsdp_common"
SPEC = "torch.distributed.tensor._dtensor_spec"
ASKED = "_tmd_place"
"""Attribute of a mesh: of whom its place was last asked, and what that is."""


class _Meshes:
    """What is known of those of this process."""

    any = False
    leave_out = False
    """Whether one has no place for a rank that this process was."""


class _Shards:
    """What was found when all DTensors of this process were last looked through."""

    even = True
    ran = -1
    """Operations that had run by then. No step is without one, so there are no others since."""


def teach() -> None:
    """From now on, objects that keep their place in a group or a mesh ask for it.

    Idempotent. Classes whose module is not imported yet are left to a later call.
    """
    for module, kind, attribute, ask in ASKING:
        loaded = sys.modules.get(module)
        if loaded is not None and attribute not in vars(getattr(loaded, kind)):
            setattr(getattr(loaded, kind), attribute, property(ask, _told))


def look_ahead(ran: int) -> None:
    """With nothing to do: find out now what :func:`turn` would look for while others wait."""
    if _Meshes.any:
        _parts_differ(ran)


def turn(groups: Iterable[Participant], *, moved: bool, ran: int) -> None:
    """Make torch see ``groups`` as they are now; ``moved``: the rank is another one, too.

    ``ran``: how many operations this process has run. Main thread, while none runs. If the process
    has moved and computes with DTensors, all its objects are looked through, which takes tens of
    milliseconds, unless nothing has run since that was done.
    """
    teach()
    known = distributed_c10d._world.pg_group_ranks
    for group in groups:
        if isinstance(group, dist.ProcessGroup) and group in known:
            known[group] = {rank: place for place, rank in enumerate(group.view.ranks)}
    if moved and _Meshes.any:
        _forget_compiled()
        if _parts_differ(ran):
            _forget_shards()


def _told(mesh: Any, place: object) -> None:
    """torch sets what is asked for; only that there is a mesh is news."""
    _Meshes.any = True


def _place(mesh: Any) -> tuple[int, ...] | None:
    """Of this process in ``mesh``; ``None`` if it has none."""
    rank = dist.get_rank()
    asked = vars(mesh).get(ASKED)
    if asked is None or asked[0] != rank:
        try:
            found = (mesh.mesh == rank).nonzero().tolist()
        except RuntimeError:  # a part of a mesh that does not have this rank
            found = []
        asked = (rank, tuple(found[0]) if found else None)
        setattr(mesh, ASKED, asked)
    place: tuple[int, ...] | None = asked[1]
    _Meshes.leave_out |= place is None
    return place


def _rank(_mesh: Any) -> int:
    return dist.get_rank()


def _shard_place(info: Any) -> int:
    return int(info.shard_process_group.rank())


def _replica_place(info: Any) -> int:
    return int(info.replicate_process_group.rank())


ASKING: tuple[tuple[str, str, str, Callable[[Any], Any]], ...] = (
    ("torch.distributed.device_mesh", "DeviceMesh", "_rank", _rank),
    ("torch.distributed.device_mesh", "DeviceMesh", "_coordinate_on_dim", _place),
    (FSDP, "FSDPMeshInfo", "shard_mesh_rank", _shard_place),
    (FSDP, "DDPMeshInfo", "replicate_mesh_rank", _replica_place),
)
"""Module, class, attribute, and what it is."""


def _parts_differ(ran: int) -> bool:
    """Whether another rank's part of a DTensor may be of another shape, or none."""
    if SPEC not in sys.modules:
        return False
    if not _Meshes.leave_out and _Shards.ran != ran:
        _Shards.even, _Shards.ran = _all_even(), ran
    return _Meshes.leave_out or not _Shards.even


def _all_even() -> bool:
    kind = sys.modules[SPEC].DTensorSpec
    if gc.get_freeze_count():
        gc.unfreeze()  # what is frozen cannot be found
    # By type(): some objects answer isinstance() with side effects.
    return all(_is_even(each) for each in gc.get_objects() if type(each) is kind)


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

    Where all parts are alike it stays: to fill the caches again takes as long as many steps.
    """
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
