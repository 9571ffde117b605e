"""Gloo as an inner group. It carries tensors of the CPU, so it shows what passing costs without a
GPU. It cannot end what runs: use it where no member is lost."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tmd.core.values.model import Membership
from tmd.fabric.generations.generation import members_of
from tmd.fabric.generations.inner import Build
from tmd.fabric.grouping import GroupView
from tmd.torch_private.c10d import Store

TIMEOUT = timedelta(seconds=30)


class GlooInner:
    """A group of Gloo for the tensors that ``takes`` accepts."""

    def __init__(self, backend: Any, takes: Callable[[Tensor], bool]) -> None:
        self._backend, self._takes = backend, takes
        self.closed = False

    @property
    def backend(self) -> Any:
        return self._backend

    def takes(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and self._takes(tensor)

    def abort(self) -> None:
        """Nothing: a call of Gloo ends with its other members, or after its time-out."""

    def close(self) -> None:
        self.closed, self._backend = True, None


def builder(store: Store, worker: str, takes: Callable[[Tensor], bool] = lambda _: True) -> Build:
    """The function that builds the groups of ``worker``; their members meet in ``store``."""

    def build(view: GroupView, membership: Membership) -> GlooInner:
        members = members_of(view, membership)
        place = dist.PrefixStore(f"{membership.epoch}/{view.name}", store)
        rank = members.index(worker)
        return GlooInner(dist.ProcessGroupGloo(place, rank, len(members), TIMEOUT), takes)

    return build
