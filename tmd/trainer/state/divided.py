"""An optimizer that is divided among ranks: torch's ``ZeroRedundancyOptimizer``.

Each rank has a *local* optimizer for the parameters that it owns, whose state is unique to it. The
local optimizers are registered, moved and hooked for the vote. The script holds the *whole* one, of
which only the values of its parameter groups matter: schedulers write them, and every step copies
them to the local one. :mod:`tmd.trainer.state_transfer.parameter_resync` handles the broadcasts of
a step after its vote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tmd.torch_private.optimizers import is_zero, steps_in_backward

Groups = Sequence[dict[str, Any]]
UNFOLLOWED = "its optimizer is divided among ranks and communicates: no shadow can follow its step"
"""Reason to copy the state of such a rank at the switch."""


def is_divided(optimizer: object) -> bool:
    """Whether each rank has only a part of the state of ``optimizer``."""
    return is_zero(optimizer)


def local(whole: Any) -> torch.optim.Optimizer:
    """This rank's part of a divided optimizer.

    Raises:
        TypeError: it steps in DDP's backward pass, before the vote.
    """
    if steps_in_backward(whole):
        raise TypeError(
            "register(optimizer=...): ZeroRedundancyOptimizer(overlap_with_ddp=True) changes "
            "parameters in the backward pass, which a broken step could not undo; leave it out"
        )
    own: torch.optim.Optimizer = whole.optim
    return own


def ranks_of(whole: Any) -> frozenset[int]:
    """The ranks that it is divided among."""
    return frozenset(torch.distributed.get_process_group_ranks(whole.process_group))


def set_values(groups: Groups, values: Sequence[Mapping[str, Any]]) -> None:
    """Set the values of ``groups`` to ``values``, except their lists of parameters."""
    for group, said in zip(groups, values, strict=True):
        group.update({k: v for k, v in said.items() if k != "params"})
