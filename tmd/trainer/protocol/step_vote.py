"""The vote: one small reduction over the world, with the same result on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import TypeVar

from msgspec import msgpack

from tmd.core.values.errors import LinkError
from tmd.core.values.model import Membership
from tmd.fabric import Fabric

T = TypeVar("T")


class VoteKind(IntEnum):
    """What ranks vote on. Only a vote on a step, with or without an update, can agree on a switch:
    that needs a boundary, which need not follow the other votes."""

    STEPPING = 0
    """A step whose optimizer runs next."""
    CLOSING = 1
    """The end of a ``batches()`` call."""
    REPEATING = 2
    """A repeatable function."""
    SKIPPING = 3
    """A step without an update."""


def ticket(membership: Membership) -> int:
    """The number by which a rank votes for a switch to ``membership``: its epoch, and a checksum of
    its rank assignment.

    After Redis has lost writes two leaders may have announced different changes with one epoch.
    Ranks with different changes must not switch.
    """
    held: object = membership.members
    if membership.adopted:
        held = (membership.members, membership.adopted)
    return membership.epoch << 32 | zlib.crc32(msgpack.encode(held))


def agree(
    fabric: Fabric,
    step: int,
    armed: int,
    kind: VoteKind,
    shares: Sequence[int] = (),
) -> tuple[int, tuple[int, ...]]:
    """Vote ok for ``step``; returns the ticket for which all ranks are armed, or 0.

    ``armed``: the ticket of this rank, 0 for none. ``shares``: additional numbers; the minimum over
    all ranks is returned for each.

    Raises:
        LinkError: a rank is gone or did not vote.
        RuntimeError: the ranks are at different steps; nothing may be committed.
    """
    mine = [step, -step, kind, -kind]
    _, least, most, *rest = fabric.reduce_min((1, armed, -armed, *mine, *shares))
    place, rest = rest[: len(mine)], rest[len(mine) :]
    if place != mine:
        raise RuntimeError(
            f"ranks are at different places (steps {place[0]} to {-place[1]}): every rank must run "
            "the same number of steps in each batches() call, leave out the update of the same "
            "ones, and run the same repeatable functions between them"
        )
    return least if least == -most else 0, tuple(rest)


def exchange(fabric: Fabric, own: T, kind: type[T]) -> tuple[T, ...]:
    """Exchange a value with all ranks; returns those of all. msgspec must encode it.

    If workers have adopted ranks there is one value for each worker.

    Raises:
        LinkError: a rank was lost.
    """
    rank, size = fabric.rank or 0, fabric.size or 1
    if fabric.passes.shrunk:
        rank, size = fabric.passes.seat
    values = {rank: own}
    offset = 1
    while offset < size:
        received = fabric.shift(msgpack.encode(values), offset)
        values |= msgpack.decode(received, type=dict[int, kind])  # type: ignore[valid-type]
        offset *= 2
    return tuple(values[rank] for rank in range(size))


def gather(fabric: Fabric, own: T, kind: type[T]) -> tuple[T, ...]:
    """Exchange a value during set-up; returns those of all ranks. msgspec must encode it.

    Raises:
        RuntimeError: a rank was lost.
    """
    try:
        return exchange(fabric, own, kind)
    except LinkError as error:
        raise RuntimeError(
            f"a rank was lost during set-up ({error}): start the job again"
        ) from error
