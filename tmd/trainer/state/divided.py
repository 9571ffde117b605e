"""An optimizer whose state is divided among ranks: torch's ``ZeroRedundancyOptimizer``.

Each rank has a *local* optimizer for the parameters that it owns, whose state is unique to it. The
local optimizers are registered, moved and hooked for the vote. The script holds the *whole* one, of
which only the hyperparameters in ``param_groups`` matter: schedulers change them, and every step
copies them to the local optimizer. The broadcasts of updated parameters, which come after the vote
of a step, are handled by :mod:`tmd.trainer.state_transfer.parameter_resync`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tmd.torch_private.optimizers import steps_in_backward

ParamGroups = Sequence[dict[str, Any]]
NOT_SHADOWED = "its optimizer is divided among ranks and communicates: no shadow can follow it"
"""Why the state of a rank with such an optimizer is copied at the switch, not before."""


def local(whole: Any) -> torch.optim.Optimizer:
    """This rank's part of a divided optimizer.

    Raises:
        TypeError: it steps in DDP's backward pass, before the vote.
    """
    if steps_in_backward(whole):
        raise TypeError(
            "register(optimizer=...): ZeroRedundancyOptimizer(overlap_with_ddp=True) changes "
            "parameters in the backward pass, so that a broken step could not be undone; leave out "
            "overlap_with_ddp"
        )
    own: torch.optim.Optimizer = whole.optim
    return own


def ranks_of(whole: Any) -> frozenset[int]:
    """The global ranks that the optimizer ``whole`` is divided among."""
    return frozenset(torch.distributed.get_process_group_ranks(whole.process_group))


def set_values(groups: ParamGroups, values: Sequence[Mapping[str, Any]]) -> None:
    """Copy each mapping in ``values``, except ``params``, into the group at the same place."""
    for group, new in zip(groups, values, strict=True):
        group.update({k: v for k, v in new.items() if k != "params"})
