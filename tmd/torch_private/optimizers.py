"""Optimizers, gradient scalers, and ``ZeroRedundancyOptimizer``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

import torch

T = TypeVar("T")

_AFTER_SCALED_STEP: WeakKeyDictionary[torch.amp.GradScaler, tuple[ref[Any], Any]] = (
    WeakKeyDictionary()
)
"""The owner and the function of each hook. A ``WeakMethod`` would print an error at exit."""
_CALLING_HOOKS: WeakSet[Callable[..., Any]] = WeakSet()
"""Functions that take the place of ``step`` in classes of scalers."""


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


def call_after_scaled_step(
    scaler: torch.amp.GradScaler, owner: T, hook: Callable[[T], None]
) -> None:
    """Call ``hook(owner)`` after each ``scaler.step()``, also after one that skips its optimizer,
    as long as ``owner`` lives. It takes the place of an earlier hook of ``scaler``; a copy of
    ``scaler`` has none."""
    _AFTER_SCALED_STEP[scaler] = ref(owner), hook
    stepping = _stepping(scaler)
    step = stepping.step
    if step in _CALLING_HOOKS:
        return

    @functools.wraps(step)
    def stepped(self: torch.amp.GradScaler, *args: Any, **named: Any) -> Any:
        result = step(self, *args, **named)
        found = _AFTER_SCALED_STEP.get(self)
        # A derived class may have called this one.
        if found is not None and _stepping(self) is stepping:
            holder, called = found[0](), found[1]
            if holder is not None:
                called(holder)
        return result

    _CALLING_HOOKS.add(stepped)
    # In the class: an attribute of the scaler would be a part of its copies, and cannot be pickled.
    stepping.step = stepped


def _stepping(scaler: torch.amp.GradScaler) -> Any:
    """The class whose ``step`` a call of ``scaler.step()`` runs first."""
    return next(kind for kind in type(scaler).__mro__ if "step" in vars(kind))


def forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """Let a repeated step unscale its gradients again, which the scaler would refuse."""
    # A disabled scaler keeps nothing, not even the attribute.
    if scaler.is_enabled():
        scaler._per_optimizer_states.clear()
