"""The parts of a worker, assembled as in the product, around a fabric without peers."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from tmd.core.values.limits import ShadowLimits
from tmd.fabric import Fabric, GroupTable, GroupView
from tmd.trainer.state.local import LocalState
from tmd.trainer.state.state import Registry
from tmd.trainer.state_transfer.context import RankContext

FAST = ShadowLimits(copy_mb_s=1e6)


class NoGroups:
    """A fabric without peers."""

    rank = 0
    size = 1

    def __init__(self, built: tuple[GroupView, ...] = ()) -> None:
        self.built = built
        self.table: GroupTable = ()

    def learn(self, table: GroupTable) -> None:
        self.table = table


def context_of(
    registry: Registry,
    fabric: Any = None,
    *,
    limits: ShadowLimits = FAST,
    wrapped: tuple[nn.Module, ...] = (),
    several: bool = False,
) -> RankContext:
    """The context of the objects registered in ``registry``."""
    fabric = cast("Fabric", fabric or NoGroups())
    local = LocalState(registry)
    return RankContext.of(fabric, limits, registry, list(wrapped), local, several=several)
