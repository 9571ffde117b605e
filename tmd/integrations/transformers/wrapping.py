"""Ensures that a model is wrapped, so that its gradients are summed over the ranks."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def allow_wrapping(trainer: Any) -> None:
    """Before training: forget that ``evaluate()`` or ``predict()`` has prepared the model.

    For an evaluation Accelerate prepares a model without wrapping it, and marks it. ``train()`` of
    transformers then takes it as it is, and each rank trains by itself.
    """
    model, accelerator = trainer.model, trainer.accelerator
    marked = getattr(model, "_is_accelerate_prepared", False)
    if not marked or trainer.model_wrapped is not model or trainer.args.world_size == 1:
        return
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # else it would be cast twice
    model._is_accelerate_prepared = False
    accelerator._models[:] = [each for each in accelerator._models if each is not model]


def refuse_unwrapped(model: nn.Module, world_size: int) -> None:
    """Refuse to train each rank by itself.

    Raises:
        ValueError: nothing sums the gradients of ``model`` over the ranks.
    """
    parameters = [each for each in model.parameters() if each.requires_grad]
    wrappers = (DistributedDataParallel, FullyShardedDataParallel)
    sums = any(isinstance(each, wrappers) for each in model.modules())
    sharded = any(isinstance(each, DTensor) for each in parameters)
    if world_size > 1 and parameters and not sums and not sharded:
        raise ValueError(
            f"the {type(model).__name__} is not wrapped in DistributedDataParallel, so each of the "
            f"{world_size} ranks would train by itself: call evaluate() and predict() only after "
            "train(), and do not pass the model to accelerator.prepare_model() before it"
        )
