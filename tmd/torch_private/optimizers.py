"""Optimizers, gradient scalers, and ``ZeroRedundancyOptimizer``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def is_zero(optimizer: object) -> bool:
    """Whether each rank keeps a part of what ``optimizer`` keeps."""
    # By name: the import costs every job what only few need.
    return any(c.__name__ == "ZeroRedundancyOptimizer" for c in type(optimizer).__mro__)


def steps_in_backward(zero: Any) -> bool:
    """Whether a ``ZeroRedundancyOptimizer`` changes parameters in DDP's backward pass."""
    return bool(zero._overlap_with_ddp)


def broadcast_parameters(zero: Any) -> None:
    """Let each owner of a ``ZeroRedundancyOptimizer`` broadcast its parameters."""
    zero._sync_params()


def call_first_after_step(optimizer: torch.optim.Optimizer, hook: Callable[[], None]) -> None:
    """Call ``hook`` after each step, before the hooks that the script has registered."""
    handle = optimizer.register_step_post_hook(lambda *_: hook())
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)


def call_after_scaled_step(scaler: torch.amp.GradScaler, hook: Callable[[], None]) -> None:
    """Call ``hook`` after each ``scaler.step()``, also after one that skips its optimizer."""
    step = scaler.step

    def stepped(*args: Any, **named: Any) -> Any:
        result = step(*args, **named)
        hook()
        return result

    scaler.step = stepped  # type: ignore[method-assign]


def forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """Let a repeated step unscale its gradients again, which the scaler would refuse."""
    # A disabled scaler keeps nothing, not even the attribute.
    if scaler.is_enabled():
        scaler._per_optimizer_states.clear()
