"""Module classes of ``torch.nn``."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def keeps_statistics(module: nn.Module) -> bool:
    """Whether the forward pass of ``module`` updates running statistics."""
    return isinstance(module, _NormBase)
