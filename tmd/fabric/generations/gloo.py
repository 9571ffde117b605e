"""Gloo as an inner group. It carries tensors of the CPU, so it shows what passing costs without a
GPU. It cannot end what runs: use it where no member is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tmd.fabric.fabric import Fabric
from tmd.fabric.generations.inner import GroupRequest
from tmd.fabric.generations.link_store import meeting
from tmd.torch_private.c10d import Work as TorchWork

TIMEOUT = timedelta(seconds=30)


class WaitedOnce(TorchWork):
    """A reduce-scatter of Gloo, which copies its result into the output at each wait. By the second
    one the script may have changed the output."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work: Any = work
        self._waiting = threading.Lock()
        self._ended = False
        self._error: Exception | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Raises RuntimeError, at each wait: the operation failed."""
        with self._waiting:
            if not self._ended:
                try:
                    self._work.wait()
                except RuntimeError as error:
                    self._error = error
                self._ended, self._work = True, None
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._ended

    def exception(self) -> Any:
        return self._error


class GlooBackend(dist.ProcessGroupGloo):
    """Gloo, with a reduce-scatter that may be waited for twice."""

    def _reduce_scatter_base(self, *args: Any, **named: Any) -> WaitedOnce:
        return WaitedOnce(super()._reduce_scatter_base(*args, **named))  # type: ignore[misc]


class GlooInner:
    """A group of Gloo."""

    def __init__(self, backend: Any, store: object) -> None:
        """``store`` is kept as long as the backend may ask it."""
        self._backend, self._store = backend, store
        self.closed = False

    @property
    def backend(self) -> Any:
        return self._backend

    def abort(self) -> None:
        """Nothing: a call of Gloo ends with its other members, or after its time-out."""

    def close(self) -> None:
        self.closed, self._backend = True, None


class GlooKind:
    """Builds the groups of the worker of ``fabric``, for CPU tensors that ``takes`` wants."""

    def __init__(self, fabric: Fabric, takes: Callable[[Tensor], bool] = lambda _: True) -> None:
        self._fabric, self._takes = fabric, takes

    def takes(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and self._takes(tensor)

    def build(self, request: GroupRequest) -> GlooInner | None:
        members = request.members
        rank = members.index(self._fabric.worker)
        with meeting(self._fabric, request) as store:
            if not store.needed:
                return None
            return GlooInner(GlooBackend(store, rank, len(members), TIMEOUT), store)

    def end(self, within_s: float) -> tuple[str, ...]:
        """Nothing is freed in the background."""
        return ()
