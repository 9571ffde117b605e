"""Extracts this rank's part of a tensor that is distributed over ranks, and restores the tensor.

Only this part moves with a rank. A plain tensor is its own part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_spread(tensor: object) -> bool:
    """Whether ``tensor`` is distributed over ranks."""
    return hasattr(tensor, "placements")


def local_part(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that this rank holds, detached; it shares the memory."""
    held: Any = tensor
    if hasattr(held, "to_local"):
        # Not detached first: torch plans each operation on a DTensor again in each thread.
        with torch.no_grad():
            held = held.to_local()
    own: Tensor = held.detach()
    return own


def like(param: Tensor, value: Tensor) -> Tensor:
    """``value``, the part of a tensor as large as ``param``, distributed as ``param`` is.

    A value of another shape (a step counter) is returned unchanged.
    """
    whole: Any = param
    if not hasattr(whole, "to_local") or value.shape != local_part(param).shape:
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
