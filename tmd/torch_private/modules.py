"""Module classes of ``torch.nn``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def keeps_statistics(module: nn.Module) -> bool:
    """Whether the forward pass of ``module`` updates running statistics."""
    return isinstance(module, _NormBase)


def saved_beside_params(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and values that ``state_dict()`` has beside parameters, if no hook changes it."""
    for path, each in module.named_modules(remove_duplicate=False):
        start = f"{path}." if path else ""
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                yield start + name, buffer
        if type(each).get_extra_state is not nn.Module.get_extra_state:
            yield f"{start}_extra_state", each.get_extra_state()
