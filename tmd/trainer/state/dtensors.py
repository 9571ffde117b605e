"""A rank's own part of a tensor that is spread over ranks, and the way back.

What moves with a rank is its part. A plain tensor is its own part.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


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


def forget_gathered(modules: Iterable[nn.Module]) -> None:
    """Let FSDP2 gather anew what it has gathered in a step that was broken off.

    It takes that for valid until a backward pass has used it up, which a script that stumbles over
    garbage never comes to; and in the midst of a forward pass it would not let go of it.
    """
    # Whoever uses it has imported it, and for all others that would be a second of a core.
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if sharded is None:
        return
    for module in (each for root in modules for each in root.modules()):
        if isinstance(module, sharded):
            part: Any = module
            for group in param_groups(part._get_fsdp_state()):
                group._training_state = type(group._training_state).IDLE
                group._all_gather_result = None
            part.reshard()


def param_groups(state: Any) -> list[Any]:
    """What FSDP2 gathers together. Older versions of torch have one group, under another name."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]
