"""FSDP2: ``torch.distributed.fsdp.fully_shard``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn


def forget_gathered(modules: Iterable[nn.Module]) -> None:
    """Make FSDP2 forget a forward pass whose backward pass has not run, or not to its end.

    Until a backward pass ends, FSDP2 takes gathered parameters for valid, and it does not release
    them if the forward pass breaks off. The next backward pass would prefetch in the order of both
    forward passes.
    After an exception in a backward pass, the next forward pass would count as a part of it, and
    would add no hooks: gradients would not be reduced.
    """
    for part in sharded_modules(modules):
        state = part._get_fsdp_state()
        for group in param_groups(state):
            group._training_state = type(group._training_state).IDLE
            group._all_gather_result = None
            group._post_forward_indices.clear()
        state._training_state = type(state._training_state).IDLE
        state._modules_to_run_forward.clear()
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        getattr(state._comm_ctx, "post_forward_order", []).clear()  # made by the first pass
        part.reshard()


def forget_gradients(modules: Iterable[nn.Module]) -> None:
    """Remove gradients that FSDP2 has not reduced. The next backward pass would add to them."""
    for part in sharded_modules(modules):
        for group in param_groups(part._get_fsdp_state()):
            group._partial_reduce_output = None
            for param in group.fsdp_params:
                if "unsharded_accumulated_grad" in vars(param):  # before torch 2.15
                    param.unsharded_accumulated_grad = None
                if hasattr(param, "_unsharded_param"):  # made by the first pass
                    param._unsharded_param.grad = None


def param_groups(state: Any) -> list[Any]:
    """What FSDP2 gathers together. Older versions of torch have one group, under another name."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def sharded_modules(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """The modules that FSDP2 shards, including nested ones."""
    # A script that uses FSDP2 has imported it; importing it here would cost others a second.
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is not None:
        yield from (each for root in modules for each in root.modules() if isinstance(each, kind))
