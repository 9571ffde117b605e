"""The parameters of an optimizer, and where it keeps the tensors of its state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tmd.trainer.state.dtensors import like


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Its parameters in the order of their numbers in ``state_dict``."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def spread(param: Tensor, values: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state for ``param``, each tensor distributed as ``param`` is."""
    return {k: like(param, v) if isinstance(v, Tensor) else v for k, v in values.items()}


def beside(
    owner: torch.optim.Optimizer | None, param: Tensor, value: Tensor, *, copy: bool
) -> Tensor:
    """``value`` on the device where ``owner`` expects it for ``param``; a copy if demanded."""
    groups = [] if owner is None else owner.param_groups
    # Step counters are on the CPU, unless the optimizer runs wholly on the device.
    on_device = any(g.get("capturable") or g.get("fused") for g in groups)
    if value.dim() == 0 and param.dim() > 0 and not on_device:
        return value.clone() if copy else value
    return value.to(param.device, copy=copy)


def all_beside(
    owner: torch.optim.Optimizer | None, param: Tensor, value: Any, *, copy: bool
) -> Any:
    """``value`` with :func:`beside` for every tensor in it."""
    if isinstance(value, Tensor):
        return beside(owner, param, value, copy=copy)
    if isinstance(value, dict):
        return {k: all_beside(owner, param, v, copy=copy) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(all_beside(owner, param, v, copy=copy) for v in value)
    return value
