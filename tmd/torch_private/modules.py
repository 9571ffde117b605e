"""Module classes of ``torch.nn``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def keeps_statistics(module: nn.Module) -> bool:
    """Whether the forward pass of ``module`` updates running statistics."""
    return isinstance(module, _NormBase)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether ``module`` or one of its own parameters has a hook for the backward pass."""
    own = module._backward_hooks or module._backward_pre_hooks
    return bool(own) or any(p._backward_hooks for p in module.parameters(recurse=False))


def saved_beside_params(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and values that ``state_dict()`` has beside parameters, if no hook changes it."""
    for path, each in module.named_modules(remove_duplicate=False):
        start = f"{path}." if path else ""
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                yield start + name, buffer
        if type(each).get_extra_state is not nn.Module.get_extra_state:
            yield f"{start}_extra_state", each.get_extra_state()


def saves_more(module: nn.Module) -> list[str]:
    """Names in ``state_dict()`` that only a ``_save_to_state_dict`` of the module's class adds.

    None if all parameters are frozen: a quantized layer saves constants, which every worker has
    from the same file.
    """
    own = type(module)._save_to_state_dict
    trains = [param.requires_grad for param in module.parameters(recurse=False)]
    if own.__module__.partition(".")[0] == "torch" or (trains and not any(trains)):
        return []
    found: dict[str, Any] = {}
    own(module, found, "", True)
    known = {*module._parameters, *module._buffers, "_extra_state"}
    return [name for name in found if name not in known]
