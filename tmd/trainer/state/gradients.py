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
            # The memory stays: it may be a view of a bucket of DistributedDataParallel.
            if param.grad.requires_grad:  # of a backward pass with ``create_graph``
                param.grad = param.grad.detach()
            param.grad.zero_()
