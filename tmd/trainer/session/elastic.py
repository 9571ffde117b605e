"""Whether a worker could compute for several ranks: what registered objects say of that."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tmd.torch_private.ddp import ddp_of, has_static_graph
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.replicas import Partition


def obstacle(
    models: Sequence[nn.Module],
    alike: Partition,
    local: LocalState,
    *,
    size: int,
    snapshots: int,
    built: bool,
) -> str:
    """Why no rank of this script can be adopted; empty if nothing is known to forbid it.

    Args:
        models: as registered.
        alike: ranks of equal state.
        local: the buffers of ``models``.
        size: number of ranks.
        snapshots: steps between two snapshots, 0 for none.
        built: whether the script uses ``session.build()``.
    """
    if size < 2:
        return "it has one rank"
    if built:
        return "it uses session.build()"
    if len(alike) > 1:
        return "the state of some ranks exists once"
    if any(ddp_of(model) is None for model in models):
        return "its model is not wrapped in DistributedDataParallel"
    if has_static_graph(models):
        return "static_graph of DistributedDataParallel calls one more collective at its first use"
    if local.is_live:
        return "its model has buffers that steps change, such as BatchNorm's"
    return "it takes snapshots" if snapshots else ""
