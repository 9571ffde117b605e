"""The classes of ``torch.distributed`` that have no public name, and its record of groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore, Work
from torch.distributed import ProcessGroup, distributed_c10d

__all__ = [
    "Store",
    "TCPStore",
    "Work",
    "check_new_groups",
    "error_of",
    "group_ranks",
    "keep_flight_recorder_off",
]


def error_of(work: Work) -> object | None:
    """The error of a failed operation; ``None`` if it has not failed, or if torch cannot say: 2.11
    returns a C++ exception that it cannot convert to a Python object."""
    try:
        error: object | None = work.exception()
    except TypeError:
        return None
    return error


def check_new_groups(check: Callable[[str, int], None]) -> None:
    """Call ``check`` with the backend and the size of each group that torch is about to make."""
    make = distributed_c10d._new_process_group_helper

    def checked(
        size: int, rank: int, ranks: list[int], backend: Any, *more: Any, **named: Any
    ) -> Any:
        check(str(backend or ""), size)
        return make(size, rank, ranks, backend, *more, **named)

    distributed_c10d._new_process_group_helper = checked  # type: ignore[assignment]


def keep_flight_recorder_off(backend: str) -> None:
    """Keep torch from attaching its flight recorder to groups of ``backend``, for groups that are
    implemented in Python: it reads a group's name in C++, where they have none. Before torch 2.15
    this has no effect, since torch attaches no recorder."""
    recorded: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recorded.add(backend)


def group_ranks() -> dict[ProcessGroup, dict[int, int]]:
    """What torch remembers of each group: global rank -> rank in the group. May be changed."""
    return distributed_c10d._world.pg_group_ranks
