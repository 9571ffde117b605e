"""A rank's own part of a tensor that is spread over ranks, and the way back.

What moves with a rank is its part. A plain tensor is its own part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def part(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that this rank holds, detached; it shares the memory."""
    held: Any = tensor
    if hasattr(held, "to_local"):
        # Not detached first: what is done to a whole is thought through, anew in each thread.
        with torch.no_grad():
            held = held.to_local()
    own: Tensor = held.detach()
    return own


def like(param: Tensor, value: Tensor) -> Tensor:
    """``value``, the part of something as large as ``param``, spread as ``param`` is.

    A value of another shape (a step counter) is returned as it is.
    """
    whole: Any = param
    if not hasattr(whole, "to_local") or value.shape != part(param).shape:
        return value
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return DTensor.from_local(
            value,
            whole.device_mesh,
            whole.placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
