"""The backend ``tmd`` as torch sees it, and the fabric it uses."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

import torch.distributed as dist

from tmd.fabric.fabric import Fabric
from tmd.fabric.generations.passing import PassingGroup
from tmd.fabric.group import Group
from tmd.fabric.rank_remap import teach
from tmd.fabric.rendezvous import publish_environment
from tmd.fabric.solo import lone_fabric
from tmd.torch_private.c10d import check_new_groups, keep_flight_recorder_off

NAME = "tmd"
ALLOWED = {"", NAME, "fake"}
"""Backends that a new group may have. A fake one communicates with nobody."""


class _Behind:
    """Process-wide, because torch creates groups by name and not from an object."""

    installed: Fabric | None = None
    solo: Fabric | None = None
    owner = 0
    """The process that uses them. A fork of it inherits them, and must leave them alone."""


def install(fabric: Fabric) -> None:
    """Make ``dist.init_process_group("tmd")`` create groups of ``fabric`` from now on.

    The fabric must hold a rank or be in the sandbox. The plain call also works without a shared
    store, see :func:`tmd.fabric.rendezvous.publish_environment`.
    """
    rank, size = fabric.rank, fabric.size
    if rank is None or size is None:
        raise ValueError("enter a membership or the sandbox before installing the fabric")
    register()
    teach()
    _Behind.installed, _Behind.owner = fabric, os.getpid()
    publish_environment(rank, size)


def _leave() -> None:
    """Clean up at the end of the process if the script has not destroyed its groups."""
    if _Behind.owner != os.getpid():
        return
    orderly = not ends_by_error()
    for fabric in (_Behind.installed, _Behind.solo):
        if fabric is not None:
            fabric.close(orderly=orderly)


def ends_by_error() -> bool:
    """Whether an uncaught exception has ended the script. The status of the process is then 1."""
    return getattr(sys, "last_value", None) is not None


def register() -> None:
    """Make the name ``tmd`` known to torch; idempotent."""
    if NAME not in dist.Backend.backend_list:
        keep_flight_recorder_off(NAME)
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        check_new_groups(_refuse_other)
        # Threads inside torch at interpreter exit would abort the process.
        atexit.register(_leave)


def _refuse_other(backend: str, size: int) -> None:
    """Raises ValueError: another backend would look for the other ranks in the store of this one
    process, and wait there until the group's time-out."""
    kinds = {kind.rpartition(":")[2] for kind in backend.split(",")}
    if _Behind.installed is not None and size > 1 and kinds - ALLOWED:
        raise ValueError(
            f"a process group with backend={backend!r} cannot reach the other ranks under tmd: "
            f"leave 'backend' out, or give {NAME!r}, whose groups carry tensors in host memory and "
            "on devices"
        )


def _create(options: Any, backend_options: Any = None) -> Group:
    ranks = list(options.global_ranks_in_group)
    fabric = _Behind.installed
    if fabric is None:
        if not ranks:
            _Behind.solo = lone_fabric(options.store, options.group_rank, options.group_size)
            _Behind.owner = os.getpid()
        fabric = _Behind.solo
    if fabric is None:
        raise RuntimeError("a tmd group was created without a default group of tmd")
    passing = PassingGroup if fabric.generations.kind is not None else Group
    group = passing if fabric is _Behind.installed else SoloGroup
    return group(
        fabric,
        str(options.group_id),
        ranks or range(options.group_size),
        timeout=options.timeout,
        strict=fabric is not _Behind.installed,
    )


class SoloGroup(Group):
    """A group without the runtime; the fabric is closed with the default group."""

    def shutdown(self) -> None:
        super().shutdown()
        if not self._fabric.groups():
            self._fabric.close()
