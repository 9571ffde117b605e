"""``torch.nn.parallel.DistributedDataParallel``."""

from __future__ import annotations

from torch import nn


def rebuilt_buckets(module: nn.Module) -> str | None:
    """The gradient buckets of ``module`` once its reducer has rebuilt them, empty until then.

    ``None`` if ``module`` is not a DDP module. DDP keeps its lock while a step waits for others.
    """
    logged = getattr(module, "_get_ddp_logging_data", None)
    return None if logged is None else str(logged().get("rebuilt_per_bucket_param_indices", ""))
