"""tmd's own algorithms behind generations, for tests without a GPU.

A job that uses them changes generations as a job with NCCL does: all members meet in the same way,
and generations are built beside training, switched, aborted and freed. Only the collectives differ.
"""

from __future__ import annotations

from torch import Tensor

from tmd.fabric.fabric import Fabric
from tmd.fabric.generations.inner import GroupRequest
from tmd.fabric.generations.link_store import meeting


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

    def build(self, request: GroupRequest) -> RingInner | None:
        with meeting(self._fabric, request) as store:
            return RingInner() if store.needed else None

    def end(self, within_s: float) -> tuple[str, ...]:
        """Nothing is freed in the background."""
        return ()
