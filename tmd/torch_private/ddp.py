"""``torch.nn.parallel.DistributedDataParallel``."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def ddp_of(module: nn.Module) -> DistributedDataParallel | None:
    """``module`` if it is a DDP module, or the one that it is compiled from."""
    while isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
        module = inner
    return module if isinstance(module, DistributedDataParallel) else None


def rebuilt_buckets(module: nn.Module) -> str | None:
    """The gradient buckets of ``module`` once its reducer has rebuilt them, empty until then.

    ``None`` if ``module`` is not a DDP module. DDP keeps its lock while a step waits for others.
    """
    logged = getattr(module, "_get_ddp_logging_data", None)
    return None if logged is None else str(logged().get("rebuilt_per_bucket_param_indices", ""))
