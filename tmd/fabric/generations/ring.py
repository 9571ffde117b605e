"""tmd's own algorithms behind generations, for tests without a GPU.

A job of it changes its generations as one of NCCL does: they are built beside training, by the same
meeting of all members, switched, aborted and freed. Only the collectives differ.
"""

from __future__ import annotations

from torch import Tensor

from tmd.core.values.model import Membership
from tmd.fabric.fabric import Fabric
from tmd.fabric.generations.inner import Wanted
from tmd.fabric.generations.link_store import meeting
from tmd.fabric.grouping import GroupView


class RingInner:
    """Members that have met."""

    backend = None

    def abort(self) -> None:
        """Nothing: the links of the epoch are closed already."""

    def close(self) -> None:
        pass


class RingKind:
    """Builds the groups of the worker of ``fabric``, for tensors of the CPU."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def takes(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def build(self, view: GroupView, membership: Membership, wanted: Wanted) -> RingInner:
        with meeting(self._fabric, view, membership, wanted):
            return RingInner()

    def end(self, within_s: float) -> tuple[str, ...]:
        """Nothing is freed in the background."""
        return ()
