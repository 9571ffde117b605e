"""NCCL as an inner group.

The settings below avoid what is known to hang or to end a process when a peer is lost; each names
its source.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import MutableMapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tmd.fabric.fabric import Fabric
from tmd.fabric.generations.device_memory import BuildMemory
from tmd.fabric.generations.inner import BuildTime, GroupRequest
from tmd.fabric.generations.link_store import meeting

log = logging.getLogger("tmd.trainer")

FREED_S = 5.0
"""Longest wait at a switch for the memory of the groups before."""
TIMEOUT = timedelta(hours=1)
"""The watch of the links notices a loss; torch's own time-out would end the process."""
NEEDED = {
    # torch's watchdog ends the process on an error or a time-out (pytorch issues 126544, 155916).
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # It sleeps four times as long with the lock of its list of works held.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}
"""Set whatever the environment says: torchrun itself sets the first one to 1."""
USUAL = {
    # Rings connect while a communicator is built, and not in the first collective.
    "NCCL_RUNTIME_CONNECT": "0",
    # In-switch reductions order their sums by topology, and their aborts hang (nccl issue 1777).
    "NCCL_NVLS_ENABLE": "0",
}


def apply_settings(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what NCCL and torch read when the first group is built."""
    for name, value in USUAL.items():
        environment.setdefault(name, value)
    for name, value in NEEDED.items():
        if environment.get(name, value) != value:
            log.info("%s=%s is set to %s: see %s", name, environment[name], value, __name__)
        environment[name] = value


class Freeing(threading.Thread):
    """Frees a group of NCCL, and holds its last reference: it may wait long for a device or a peer
    that is gone, and training must not."""

    def __init__(self, group: str, backend: Any, store: object, *, aborted: bool) -> None:
        super().__init__(name=f"tmd-free-{group}", daemon=True)
        self.group, self._store = group, store
        self._backend, self._aborted = backend, aborted

    def run(self) -> None:
        if not self._aborted:
            self._backend.shutdown()
        self._backend = None

    def abort(self) -> None:
        """End what it waits for. May hang."""
        if (backend := self._backend) is not None:
            backend.abort()


def end_all(freeing: Sequence[Freeing], within_s: float) -> tuple[str, ...]:
    """Wait for all, abort those that have not ended ``within_s``, and wait as long again; returns
    the groups that hang."""
    _join(freeing, within_s)
    stuck = [each for each in freeing if each.is_alive()]
    for each in stuck:
        threading.Thread(target=each.abort, name=f"tmd-abort-{each.group}", daemon=True).start()
    _join(stuck, within_s)
    return tuple(each.group for each in stuck if each.is_alive())


def _join(threads: Sequence[threading.Thread], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))


class NcclInner:
    """A group of NCCL."""

    def __init__(self, group: str, backend: Any, freeing: list[Freeing], store: object) -> None:
        """``freeing`` gets the thread that frees it. ``store`` is kept as long as the backend may
        ask it."""
        self._store = store
        self._group, self._backend, self._freeing = group, backend, freeing
        self._aborted = False

    @property
    def backend(self) -> Any:
        return self._backend

    def abort(self) -> None:
        self._aborted = True
        self._backend.abort()

    def close(self) -> None:
        backend, self._backend = self._backend, None
        thread = Freeing(self._group, backend, self._store, aborted=self._aborted)
        self._freeing[:] = [*(each for each in self._freeing if each.is_alive()), thread]
        thread.start()


def _usual_device() -> torch.device:
    """The GPU that a script chooses as a rule, for a joiner that has not computed yet."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local % torch.cuda.device_count())


class NcclKind:
    """Builds the groups of the worker of ``fabric``, for tensors of its GPU."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._device: torch.device | None = None
        self._freeing: list[Freeing] = []
        self._memory = BuildMemory()

    def takes(self, tensor: Tensor) -> bool:
        if tensor.is_cuda:
            self._device = tensor.device
        return tensor.is_cuda

    def build(self, request: GroupRequest) -> NcclInner | None:
        members = request.members
        rank = members.index(self._fabric.worker)
        # A thread that builds has no device of its own.
        device = request.device or self._device or _usual_device()
        if request.when is BuildTime.BESIDE:
            # Before the others wait inside NCCL, which cannot be ended.
            self._memory.check(request.view.name, device)
        with meeting(self._fabric, request) as store:
            if not store.needed:
                return None
            at_switch = request.when is BuildTime.AT_SWITCH
            if at_switch and not self._memory.fits(request.view.name, device):
                request.make_room()
                _join(self._freeing, FREED_S)
            torch.cuda.set_device(device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            with self._memory.measured(
                request.view.name, device, beside=request.when is BuildTime.BESIDE
            ):
                backend = dist.ProcessGroupNCCL(store, rank, len(members), options)
                backend.eager_connect_single_device(device)
        return NcclInner(request.view.name, backend, self._freeing, store)

    def end(self, within_s: float) -> tuple[str, ...]:
        # A thread inside torch when the interpreter ends would abort the process.
        return end_all(self._freeing, within_s)
