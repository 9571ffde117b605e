"""Whether parameters have a gradient between two steps.

An optimizer passes over a parameter without a gradient. With a gradient of zeros it applies
momentum and weight decay. So that difference is part of the state of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def set_graded(params: Iterable[tuple[Tensor, bool]]) -> None:
    """Give each parameter a gradient of zeros, or none."""
    for param, graded in params:
        if not graded:
            param.grad = None
        elif param.grad is None:
            param.grad = torch.zeros_like(param)
        else:
            param.grad.detach_().zero_()
