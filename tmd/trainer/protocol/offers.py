"""What a source says of a state before its tensors follow."""

from __future__ import annotations

from msgspec import Struct

from tmd.fabric import GroupTable
from tmd.trainer.state.data import Position
from tmd.trainer.state.roles import Role
from tmd.trainer.state.state import Layouts


class Offer(Struct, frozen=True):
    """What a joiner must know of a state to say whether it fits here, and to find its place."""

    layouts: Layouts
    buckets: str
    groups: GroupTable
    """Of every rank, packed: a standby may take any."""
    seeds: tuple[int, ...]
    position: Position
    roles: tuple[Role, ...] = ()
    """Of every rank."""


class StateHeader(Struct, frozen=True):
    """All of a state but its tensors."""

    step: int
    offer: Offer
    local: bytes = b""
    """Rank-local state of the rank that moves (failover); empty if the source's own serves."""
