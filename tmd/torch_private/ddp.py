"""``torch.nn.parallel.DistributedDataParallel``."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks import (
    _AllreduceUpcastHookState,
)
from torch.nn.parallel import DistributedDataParallel


def ddp_of(module: nn.Module) -> DistributedDataParallel | None:
    """``module`` if it is a DDP module, or the one that it is compiled from."""
    while isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
        module = inner
    return module if isinstance(module, DistributedDataParallel) else None


def reduces(module: DistributedDataParallel) -> bool:
    """Whether the backward pass of a forward pass of ``module`` that runs now reduces gradients."""
    return torch.is_grad_enabled() and bool(module.require_backward_grad_sync)


def rebuilds_buckets(module: DistributedDataParallel) -> bool:
    """Whether ``module`` puts its gradients into other buckets after its first backward pass."""
    return bool(module.static_graph or not module.find_unused_parameters)


def has_rebuilt_buckets(module: DistributedDataParallel) -> bool:
    """Whether ``module`` has done so, at the beginning of a forward pass."""
    return bool(module._has_rebuilt_buckets)


def hook_states(module: DistributedDataParallel) -> list[object]:
    """What the communication hooks of ``module`` keep from step to step."""
    states = (state for _, state in module._comm_hooks)
    own = (ProcessGroup, _AllreduceUpcastHookState)  # of DDP itself
    return [each for each in states if each is not None and not isinstance(each, own)]


def rebuilt_buckets(module: nn.Module) -> str | None:
    """The gradient buckets of ``module`` once its reducer has rebuilt them, empty until then.

    ``None`` if ``module`` is not a DDP module. DDP keeps its lock while a step waits for others.
    """
    logged = getattr(module, "_get_ddp_logging_data", None)
    return None if logged is None else str(logged().get("rebuilt_per_bucket_param_indices", ""))
