"""What a generation needs of the group that does its collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from tmd.core.values.model import Membership
from tmd.fabric.grouping import GroupView


class Inner(Protocol):
    """A group of fixed members."""

    @property
    def backend(self) -> Any:
        """The ``torch.distributed`` backend, with the collectives."""
        ...

    def takes(self, tensor: Tensor) -> bool:
        """Whether it communicates tensors like this one. tmd's own algorithms do the others."""
        ...

    def abort(self) -> None:
        """End what is running, which completes without error; its outputs are undefined.

        Any thread may call it, also while a collective or :meth:`close` hangs. It may hang, too.
        """
        ...

    def close(self) -> None:
        """Free its memory and threads. Nothing runs in it, or it was aborted."""
        ...


Build = Callable[[GroupView, Membership], Inner]
"""Builds the inner group of this worker. It waits for the other members, and may raise or hang."""
