"""What a generation needs of the group that does its collectives."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tmd.core.values.model import Membership
from tmd.fabric.grouping import GroupView

Wanted = Callable[[], bool]
"""Whether what is being built is still wanted."""


class BuildTime(StrEnum):
    """When a group is built."""

    BESIDE = "beside training"
    """Training goes on meanwhile, in the group of the present epoch."""
    AT_SWITCH = "at the switch"
    """Once no member uses the group of the epoch before any more."""
    ALONE = "alone"
    """At the start of a job, or after a loss."""


class CannotBuildBeside(RuntimeError):
    """The group cannot be built while training uses the one of the present epoch. It may be built
    once that one is freed."""


class GroupRequest(NamedTuple):
    """A group to be built, as one of its members asks for it."""

    view: GroupView
    membership: Membership
    wanted: Wanted
    device: torch.device | None = None
    """The device of the tensors that this worker has used in the group; ``None`` without any."""
    round: int = 0
    """Counts the builds of one epoch: in an earlier one no member needed the group."""
    when: BuildTime = BuildTime.ALONE
    met: Callable[[], None] = lambda: None
    """To be called once all members are here."""
    make_room: Callable[[], None] = lambda: None
    """At a switch, once all are here: frees the group of the epoch before. The rank that leaves may
    still be inside its last operation, so that it is only for where both find no room."""

    @property
    def members(self) -> tuple[str, ...]:
        """Workers by rank in the group."""
        return tuple(self.membership.members[rank].worker for rank in self.view.ranks)


class Inner(Protocol):
    """A group of fixed members."""

    @property
    def backend(self) -> Any:
        """The ``torch.distributed`` backend with the collectives; ``None`` if they are tmd's own.

        A work of the backend is complete once its device is done with it.
        """
        ...

    def abort(self) -> None:
        """End what is running, which completes without error; its outputs are undefined.

        Any thread may call it, also while a collective or :meth:`close` hangs. It may hang, too.
        """
        ...

    def close(self) -> None:
        """Free its memory and threads. Nothing runs in it, or it was aborted."""
        ...


class InnerKind(Protocol):
    """Builds the inner groups of one worker."""

    def takes(self, tensor: Tensor) -> bool:
        """Whether inner groups communicate tensors like this one. tmd's own algorithms do the
        others."""
        ...

    def build(self, request: GroupRequest) -> Inner | None:
        """Build this worker's part of a group. It waits for the other members, and may hang.

        Returns ``None``, as on all members, if none has used the group yet: a script may have
        groups that it never uses, and each costs memory of the device.

        Raises:
            CannotBuildBeside: it may be built later, at a switch.
            Exception: it cannot be built, or is no longer wanted.
        """
        ...

    def end(self, within_s: float) -> tuple[str, ...]:
        """Wait a while for what is still being freed, then abort it: the process ends. Returns the
        groups that hang."""
        ...
