"""What ``DeviceMesh``, ``DTensor``, FSDP2 and compiled code derive from a rank and keep."""

from __future__ import annotations

import sys
from typing import Any

import torch

MESH = "torch.distributed.device_mesh"
FSDP = "torch.distributed.fsdp._fully_shard._fsdp_common"
SPEC = "torch.distributed.tensor._dtensor_spec"
PLACES = (
    (MESH, "DeviceMesh", "_rank"),
    (MESH, "DeviceMesh", "_coordinate_on_dim"),
    (FSDP, "FSDPMeshInfo", "shard_mesh_rank"),
    (FSDP, "DDPMeshInfo", "replicate_mesh_rank"),
)
"""Module, class and attribute of each place that torch computes once and keeps."""


def spec_class() -> type | None:
    """The class of DTensor specs, if this process has imported it."""
    loaded = sys.modules.get(SPEC)
    return getattr(loaded, "DTensorSpec", None)


def forget_compiled() -> None:
    """Reset compiled code: a coordinate may be a constant in it."""
    reset = getattr(sys.modules.get("torch._dynamo"), "reset", None)
    if reset is not None:
        reset()


def forget_shards() -> None:
    """Clear DTensor's caches, which hold shapes of this rank's parts without naming the rank."""
    from torch.distributed.tensor import DTensor, _redistribute

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    cache = type(propagator.propagate_op_sharding)
    # One per thread: only a new object clears it for all threads.
    propagator.propagate_op_sharding = cache(propagator.propagate_op_sharding_non_cached)
    for clear in (
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None),
        getattr(getattr(_redistribute, "_gen_transform_infos", None), "cache_clear", None),
    ):
        if clear is not None:
            clear()
