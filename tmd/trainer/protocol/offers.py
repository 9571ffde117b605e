"""What a source reports about a state before its tensors follow."""

from __future__ import annotations

from msgspec import Struct

from tmd.fabric import GroupTable
from tmd.trainer.state.data import Position
from tmd.trainer.state.layout import Layouts
from tmd.trainer.state.roles import Role


class Offer(Struct, frozen=True):
    """What a joiner needs to check whether a state fits, and to find its data position."""

    layouts: Layouts
    groups: GroupTable
    """Groups of every rank, packed: a standby may assume any."""
    seeds: tuple[int, ...]
    position: Position
    roles: tuple[Role, ...] = ()
    """Roles of all ranks."""


class StateHeader(Struct, frozen=True):
    """Everything of a state except its tensors."""

    step: int
    offer: Offer
    local: bytes = b""
    """Rank-local state of the rank that moves (failover); empty if the source's own serves."""
    graded: tuple[int, ...] | None = None
    """Units that have a gradient; ``None`` if unknown."""
