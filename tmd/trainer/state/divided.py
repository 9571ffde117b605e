"""An optimizer that is divided among ranks: torch's ``ZeroRedundancyOptimizer``.

Each rank has a *local* optimizer for the parameters that it owns, and its state exists once. Local
optimizers are what is registered, moved and asked to vote. What the script has is the *whole* one,
of which only the values of its parameter groups count: schedulers write to them, and every step
copies them to the local one. What a step does besides, after its vote, is the business of
:mod:`tmd.trainer.state_transfer.parameter_resync`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tmd.torch_private.optimizers import is_zero, steps_in_backward

Groups = Sequence[dict[str, Any]]
UNFOLLOWED = "its optimizer is divided among ranks and communicates: no shadow can follow its step"
"""Why the state of such a rank is copied at the switch."""


def is_divided(optimizer: object) -> bool:
    """Whether each rank has a part of what ``optimizer`` keeps."""
    return is_zero(optimizer)


def local(whole: Any) -> torch.optim.Optimizer:
    """What of a divided optimizer is this rank's.

    Raises:
        TypeError: it steps in DDP's backward pass, which is before the vote.
    """
    if steps_in_backward(whole):
        raise TypeError(
            "register(optimizer=...): ZeroRedundancyOptimizer(overlap_with_ddp=True) changes "
            "parameters in the backward pass, which a broken step could not undo; leave it out"
        )
    own: torch.optim.Optimizer = whole.optim
    return own


def ranks_of(whole: Any) -> frozenset[int]:
    """Among whom it is divided."""
    return frozenset(torch.distributed.get_process_group_ranks(whole.process_group))


def set_values(groups: Groups, values: Sequence[Mapping[str, Any]]) -> None:
    """Let ``groups`` say what ``values`` do, but for the parameters that they name."""
    for group, said in zip(groups, values, strict=True):
        group.update({k: v for k, v in said.items() if k != "params"})
